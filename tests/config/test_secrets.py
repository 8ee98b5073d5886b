"""Secrets of a configuration: masked where they are shown, kept apart where they are stored."""

from __future__ import annotations

from embarcadero.config import load
from embarcadero.config.secrets import join, masked, secret_values, split

PROPERTIES = [
    "type=sql",
    "uri=postgresql://me:pass-word@db.example/catalog?sslpassword=other-word",
    "s3.endpoint=http://127.0.0.1:9000",
    "s3.secret-access-key=hush-hush",
    "header.Authorization=Bearer abcdef",
    "second-half-of-a-value",
]


def test_only_harmless_properties_are_shown() -> None:
    """Names and places are; values that may be secret are not, nor what a name is missing for."""
    assert masked("tier.properties", PROPERTIES) == [
        "type=sql",
        "uri=postgresql://***@db.example/catalog",
        "s3.endpoint=http://127.0.0.1:9000",
        "s3.secret-access-key=***",
        "header.Authorization=***",
        "***",
    ]
    assert masked("broker.host", "127.0.0.1") == "127.0.0.1"


def test_a_configuration_without_its_secrets_is_joined_again() -> None:
    """Nothing else changes; keys that hold no secret are not taken."""
    config = load(None, {"tier.properties": PROPERTIES, "broker.port": 0})
    public, secrets = split(config)
    assert public.tier.properties == []
    assert join(public, secrets) == config
    assert join(public, {"broker.host": ["0.0.0.0"], "no.key": ["x"]}) == public


def test_the_texts_that_logs_must_not_have() -> None:
    """Values, the password of a URI, and what follows its question mark."""
    assert secret_values(load(None, {"tier.properties": PROPERTIES})) == [
        "second-half-of-a-value", "sslpassword=other-word", "Bearer abcdef", "hush-hush", "pass-word",
    ]  # fmt: skip
