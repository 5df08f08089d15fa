"""MLflow: to the server that ``MLFLOW_TRACKING_URI`` names, else to ``mlflow.db`` beside the runs.

Look at the local one with ``mlflow ui --backend-store-uri sqlite:///yunlu-runs/mlflow.db``.
"""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any

from yunlu.core.errors import missing_part
from yunlu.core.files import create_private
from yunlu.core.secrets import mask, mask_value
from yunlu.runs.run_store import read_json, require_local
from yunlu.runs.states import RunState
from yunlu.training.trackers.tracker import flatten, public_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from yunlu.runs.run_store import RunStore
    from yunlu.spec.job import Job

EXPERIMENT = "yunlu"
# Server limits per request and per value (older servers: 500 characters).
_DOCUMENT = "mlflow.json"
"""Document of the run: where its MLflow run is."""
_METRICS_PER_BATCH = 1000
_PARAMS_PER_BATCH = 100
_PARAM_LENGTH = 500
_KEY_LENGTH = 250
_BATCH_EVERY_S = 2.0
_STATUS = {
    RunState.FINISHED: "FINISHED",
    RunState.STOPPED: "KILLED",
    RunState.FAILED: "FAILED",
    RunState.LOST: "FAILED",
}


class MlflowTracker:
    """One MLflow run per Yunlu run, in the experiment ``yunlu``; a resumed attempt continues it."""

    def __init__(self) -> None:
        self._mlflow: Any = None
        self._client: Any = None
        self._run_id = ""
        self._pending: list[Any] = []
        self._sent_at = 0.0

    def start(self, run: RunStore, job: Job, *, resumed: bool) -> None:
        """Reopen this run's MLflow run, or create one with the job as its parameters."""
        del resumed  # the stored id tells, also without a checkpoint
        self._mlflow = _load_mlflow()
        tracking = self._mlflow.tracking
        here = f"sqlite:///{require_local(run).home / 'mlflow.db'}"
        uri = tracking.get_tracking_uri() if tracking.is_tracking_uri_set() else here
        if uri == here:
            create_private(require_local(run).home / "mlflow.db")
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        stored = _load_run_id(run, uri)
        if stored is not None and self._reopen(stored):
            return
        self._run_id = self._create(run, uri_is_local=uri == here)
        _save_run_id(run, uri, self._run_id)
        self._send_params(public_config(job))

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Queue metrics for the next batch, sent every few seconds or when full."""
        now_ms = round(time.time() * 1000)
        entities = self._mlflow.entities
        self._pending += [
            entities.Metric(_clean(name), value, now_ms, step) for name, value in metrics.items()
        ]
        full = len(self._pending) >= _METRICS_PER_BATCH
        if full or time.monotonic() - self._sent_at >= _BATCH_EVERY_S:
            self._send_metrics()

    def finish(self, *, state: str, summary: dict[str, Any]) -> None:
        """Send pending metrics, then the final metrics as tags, and close the run."""
        self._send_metrics()
        tags = {**flatten(mask_value(summary)), "state": state}
        entities = self._mlflow.entities
        self._client.log_batch(
            self._run_id,
            tags=[
                entities.RunTag(_clean(f"yunlu.{key}"), _show(value))
                for key, value in list(tags.items())[:_PARAMS_PER_BATCH]
            ],
        )
        status = _STATUS.get(RunState(state), "FINISHED")
        self._client.set_terminated(self._run_id, status=status)

    def _reopen(self, run_id: str) -> bool:
        try:
            self._client.update_run(run_id, status="RUNNING")
        except self._mlflow.MlflowException:  # deleted since, or another server behind the name
            return False
        self._run_id = run_id
        return True

    def _create(self, run: RunStore, *, uri_is_local: bool) -> str:
        experiment = self._client.get_experiment_by_name(EXPERIMENT)
        if experiment is None:
            # Without this a local store would put artifacts under the working directory.
            artifacts = (
                (require_local(run).home / "mlflow-artifacts").as_uri() if uri_is_local else None
            )
            try:
                experiment_id = self._client.create_experiment(EXPERIMENT, artifacts)
            except self._mlflow.MlflowException:
                # Another run created it concurrently.
                experiment_id = self._client.get_experiment_by_name(EXPERIMENT).experiment_id
        else:
            experiment_id = experiment.experiment_id
        return self._client.create_run(experiment_id, run_name=run.id).info.run_id

    def _send_params(self, config: dict[str, Any]) -> None:
        entities = self._mlflow.entities
        params = [entities.Param(_clean(key), _show(v)) for key, v in flatten(config).items()]
        for batch in _batches(params, _PARAMS_PER_BATCH):
            self._client.log_batch(self._run_id, params=batch)

    def _send_metrics(self) -> None:
        for batch in _batches(self._pending, _METRICS_PER_BATCH):
            self._client.log_batch(self._run_id, metrics=batch)
        self._pending = []
        self._sent_at = time.monotonic()


def _load_mlflow() -> ModuleType:
    try:
        import mlflow  # noqa: PLC0415 (optional, and slow to import)
    except ImportError as error:
        raise missing_part("mlflow", "mlflow", "Logging to MLflow") from error
    # It logs the creation of the local database line by line.
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    return mlflow


def _save_run_id(run: RunStore, uri: str, run_id: str) -> None:
    stored = {"uri": mask(uri), "run_id": run_id}
    run.write(_DOCUMENT, json.dumps(stored))


def _load_run_id(run: RunStore, uri: str) -> str | None:
    """The MLflow run of an earlier attempt, if it used the same server."""
    stored = read_json(run, _DOCUMENT)
    if stored is None:
        return None
    return stored.get("run_id") if stored.get("uri") == mask(uri) else None


def _clean(name: str) -> str:
    """MLflow's alphabet for names: letters, digits and ``_-. :/``."""
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in name)[:_KEY_LENGTH]


def _show(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _PARAM_LENGTH else text[: _PARAM_LENGTH - 1] + "…"


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
