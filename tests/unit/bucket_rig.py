"""Buckets made once and copied for each test that writes."""

from slackwater.testing.bucket import MemoryBucket


def copied(bucket: MemoryBucket) -> MemoryBucket:
    """A bucket of the same objects."""
    copy = MemoryBucket()
    for item in bucket.list(""):
        copy.put(item.key, bucket.get(item.key, max_bytes=item.size))
    return copy
