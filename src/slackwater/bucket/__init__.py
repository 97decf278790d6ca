"""The object store seam: a local directory, or S3, GCS and Azure through obstore."""
