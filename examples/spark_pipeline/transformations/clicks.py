"""Clicks of a shop: the topic `clicks`, record by record, and the number of each page."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()


@dp.table(comment="each record of the topic once")
def clicks() -> DataFrame:
    """A streaming table: each run adds the records since the last run."""
    rows = (
        spark.readStream.format("embarcadero")
        .options(brokers=spark.conf.get("shop.brokers"), topic="clicks", startingOffsets="earliest", reader="pipeline")
        .load()
    )
    return rows.selectExpr("seq", "timestamp", "cast(key as string) as user", "cast(value as string) as page")


@dp.materialized_view(comment="clicks by page")
def clicks_by_page() -> DataFrame:
    """Computed from the whole of the streaming table."""
    return spark.read.table("clicks").groupBy("page").count()
