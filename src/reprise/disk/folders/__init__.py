"""The folders behind the records: a directory or a bucket, and which servers use it."""
