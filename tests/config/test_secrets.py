"""Secrets of a configuration: masked on output, kept apart in storage."""

from __future__ import annotations

import pytest

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
    """Names and addresses are; values that may be secret are not, and neither are values without a known name."""
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
    """Nothing else changes; keys without secrets are ignored."""
    config = load(None, {"tier.properties": PROPERTIES, "broker.port": 0})
    public, secrets = split(config)
    assert public.tier.properties == []
    assert join(public, secrets) == config
    assert join(public, {"broker.host": ["0.0.0.0"], "no.key": ["x"]}) == public


def test_the_texts_that_logs_must_not_contain() -> None:
    """Values, the password of a URI, and its query."""
    assert secret_values(load(None, {"tier.properties": PROPERTIES})) == [
        "second-half-of-a-value", "sslpassword=other-word", "Bearer abcdef", "hush-hush", "pass-word",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pair", "shown", "hidden"),
    [
        ("uri=postgresql://me:pass/word@db/catalog", "uri=postgresql://***@db/catalog", "pass/word"),
        ("uri=postgresql://me:pass@word@db/catalog", "uri=postgresql://***@db/catalog", "pass@word"),
        ("uri=postgresql://me:pass:word@db/catalog", "uri=postgresql://***@db/catalog", "pass:word"),
        ("uri=postgresql://me:pass?word@db/catalog", "uri=postgresql://***", "pass?word"),
        ("uri=postgresql://me:pass%40word@db/catalog", "uri=postgresql://***@db/catalog", "pass@word"),
        ("uri=postgresql://me:word@db/c?token=some@thing", "uri=postgresql://***", "token=some@thing"),
        ("uri=postgresql://me:pa?word@db/c?token=thing", "uri=postgresql://***", "token=thing"),
        ("s3.endpoint=http://key:secret@minio:9000", "s3.endpoint=http://***@minio:9000", "secret"),
        ("s3.endpoint=key:secret@minio:9000", "s3.endpoint=***@minio:9000", "secret"),
        ("warehouse=s3://key:se/cret@bucket/x?sig=token", "warehouse=s3://***@bucket/x", "se/cret"),
    ],
)
def test_users_and_queries_of_urls_are_masked(pair: str, shown: str, hidden: str) -> None:
    """Any characters in a password, in each property that is shown, and in logs."""
    assert masked("tier.properties", [pair]) == [shown]
    assert hidden in secret_values(load(None, {"tier.properties": [pair]}))


def test_a_user_in_the_warehouse_is_masked() -> None:
    """Also in its own key."""
    warehouse = "s3://key:secret@bucket/folder"
    assert masked("tier.warehouse", warehouse) == "s3://***@bucket/folder"
    assert masked("tier.warehouse", "") == ""
    assert secret_values(load(None, {"tier.warehouse": warehouse})) == ["secret"]


@pytest.mark.parametrize(
    "pair", ["uri=sqlite:////home/me@corp/catalog.db", "warehouse=file:///srv/a@b", "warehouse=/srv/a@b", "type=sql"]
)
def test_paths_have_no_user(pair: str) -> None:
    """An @ in a path is shown."""
    assert masked("tier.properties", [pair]) == [pair]
    assert secret_values(load(None, {"tier.properties": [pair]})) == []
