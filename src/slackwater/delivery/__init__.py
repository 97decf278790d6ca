"""The fleet's side of the bucket: find versions, fetch and verify their bytes."""
