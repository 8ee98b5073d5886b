"""How S3 clients of readers retry: they do not. PyIceberg imports this class by its name (`storage.FOR_READERS`)."""

from __future__ import annotations

from pyarrow.fs import AwsStandardS3RetryStrategy


class OneTry(AwsStandardS3RetryStrategy):  # type: ignore[misc]  # pyarrow has no types
    """Send each request once. The reader tries again itself, and reports a store that does not answer in time."""

    def __init__(self) -> None:
        super().__init__(max_attempts=1)
