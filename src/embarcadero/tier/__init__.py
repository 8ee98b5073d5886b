"""The tier: durable parts of a topic as Parquet files in an Iceberg table. It works without Spark."""
