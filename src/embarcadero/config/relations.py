"""Values that must fit together."""

from __future__ import annotations

from typing import Final

from embarcadero.config.sizes import FABRIC_RELATIONS, Relation
from embarcadero.limits import REPLICAS_MAX

EVERY_ADDRESS: Final = frozenset({"", "0.0.0.0", "::"})
"""Addresses to listen on that nobody can connect to."""

RELATIONS: Final = (
    *FABRIC_RELATIONS,
    Relation(
        ("broker.water_low", "broker.water_high"), lambda low, high: low < high, "water_low must be below water_high"
    ),
    Relation(
        ("broker.port", "cluster.brokers"),
        lambda port, brokers: port + brokers <= 65_536,
        "the ports of all brokers must exist: use a lower port, or 0 for free ones",
    ),
    Relation(
        ("broker.advertised_port", "cluster.brokers"),
        lambda port, brokers: port + brokers <= 65_536,
        "the ports of all brokers must exist: use a lower port",
    ),
    Relation(
        ("broker.advertised_port", "broker.port"),
        lambda advertised, port: port > 0 or advertised == 0,
        "ports that clients are told need fixed ports to listen on: set broker.port",
    ),
    Relation(
        ("broker.host", "broker.advertised_host"),
        lambda host, advertised: host not in EVERY_ADDRESS or advertised not in EVERY_ADDRESS,
        "clients are told where to connect: set broker.advertised_host (--advertised-host) to an address of this "
        "machine, or broker.host (--host)",
    ),
    Relation(
        ("metrics.port", "cluster.brokers", "cluster.replicas"),
        lambda port, brokers, replicas: port + brokers + replicas <= 65_535,
        "the ports of all processes must exist: use a lower port, or 0 for free ones",
    ),
    Relation(
        ("metrics.port", "cluster.brokers", "cluster.standbys"),
        lambda port, brokers, standbys: not standbys or port + brokers + REPLICAS_MAX + standbys <= 65_535,
        "the ports of all processes must exist: use a lower port, or 0 for free ones",
    ),
    Relation(
        ("client.window_bytes", "client.batch_bytes"),
        lambda window, batch: batch <= window,
        "the window must hold at least one batch",
    ),
)
