"""The tier: durable parts of a topic as Parquet files in an Iceberg table. Nothing here needs Spark."""
