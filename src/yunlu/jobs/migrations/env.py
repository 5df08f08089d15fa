"""Alembic runs this to migrate the index; the store hands over its open connection."""

from __future__ import annotations

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    # SQLite can roll back DDL: a crash in the middle leaves the old schema, whole.
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
