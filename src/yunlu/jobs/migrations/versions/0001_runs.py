"""The index of runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("task", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("updated_at", sa.Float, nullable=False),
        sa.Column("offset", sa.Integer, nullable=False),
        sa.Column("pid", sa.Integer),
        sa.Column("process_started_at", sa.Float),
        sa.Column("step", sa.Integer),
        sa.Column("steps", sa.Integer),
        sa.Column("metric", sa.Text),
        sa.Column("metric_value", sa.Float),
        sa.Column("error", sa.Text),
    )
    op.create_index("runs_by_age", "runs", ["created_at"])


def downgrade() -> None:
    op.drop_table("runs")
