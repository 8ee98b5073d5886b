"""The native parts: fabric primitives, and partitions of keys. Both are optional: there is Python that does the same.

Without a C compiler the fabric runs on coherent x86-64 only, and says so; partitions of keys only take longer.
"""

from setuptools import Extension, setup

FLAGS = ["-O2", "-std=c11", "-Wall", "-Wextra"]

setup(
    ext_modules=[
        Extension("embarcadero.fabric._native", ["native/primitives.c"], extra_compile_args=FLAGS, optional=True),
        Extension("embarcadero.wire._partitions", ["native/partitions.c"], extra_compile_args=FLAGS, optional=True),
    ]
)
