"""The life of a job: store, service, reports."""
