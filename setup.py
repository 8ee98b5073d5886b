"""The one native part: fabric primitives. Optional: without a C compiler it runs on coherent x86-64 and says so."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "embarcadero.fabric._native",
            ["native/primitives.c"],
            extra_compile_args=["-O2", "-std=c11", "-Wall", "-Wextra"],
            optional=True,
        )
    ]
)
