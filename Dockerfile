# A cluster in a container, from a wheel: `make wheel`, then `docker build -t embarcadero .`
# PYTHON is the version that built the wheel. EXTRAS: `docker build --build-arg EXTRAS=[iceberg] ...` for tables.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim

ARG EXTRAS=""
RUN --mount=type=bind,source=build/wheel,target=/wheels \
    pip install --no-cache-dir "$(ls /wheels/embarcadero-*.whl)${EXTRAS}"

RUN useradd --uid 10001 --no-create-home embarcadero \
    && install --directory --owner embarcadero --mode 0700 /var/lib/embarcadero
USER embarcadero
VOLUME /var/lib/embarcadero

# Brokers listen on all addresses of the container. Clients get the advertised host: set it to a name that they reach.
ENV EMBARCADERO_DATA_DIR=/var/lib/embarcadero \
    EMBARCADERO_CLUSTER_BROKERS=2 \
    EMBARCADERO_BROKER_HOST=0.0.0.0 \
    EMBARCADERO_BROKER_ADVERTISED_HOST=localhost \
    EMBARCADERO_METRICS_HOST=0.0.0.0 \
    EMBARCADERO_METRICS_PORT=9600
EXPOSE 9092 9093 9600

HEALTHCHECK --interval=30s --timeout=10s --start-period=20s CMD ["embarcadero", "topic", "list", "--json"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["embarcadero"]
CMD ["up"]
