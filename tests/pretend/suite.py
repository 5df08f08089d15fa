"""Which training tests run again on the pretend accelerator, and how they are counted.

The tests are the existing ones, started in a pytest of their own whose environment has the device
(``run_tests``): programs, workers and servers that they start find it as they would find a real one, and
tests that name a device take it from ``tests/training_device.py``. What they compare with is computed on
the CPU wherever the test has a reference of its own.

Counted is by what happens, not by a list. A test *trains* if a backward pass ran in any of its processes,
on whatever device; the device's package notes each (PRETEND_BACKWARD_LOG). Of the tests that train, or fail
before they do, those count that pass, have run a backward pass on the device, and have raced nowhere::

    share = passed with a backward pass on the device / (trained anywhere, or failed)

How close: one worker's losses in fp32 are the CPU's to the bit, gradient norms to 1e-6 (``programs/training.py``);
whole runs by the command line to 1e-6 (``test_training.py``); layouts as close as the same test asks for on
the CPU; bf16 and fp16 to half a percent, since other operations are lowered than on the CPU.

Left out of both are the tests of ``DOES_NOT_APPLY``, each with its reason, and those that the machine skips
on the CPU, too. ``make test`` runs ``CORE``, ``make test-long`` all of ``ROOMS``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.pretend.build import ROOT, environment

KIND = "npu"

UNIT = "tests/unit/training"
RANKS = "tests/distributed"
WHOLE = "tests/integration"

MADE_ON_DEVICE = (
    *(f"{UNIT}/{room}/" for room in ("memory", "optim")),
    *(f"{UNIT}/precision/test_{name}" for name in ("adaptive", "autocast", "policy")),
    *(f"{UNIT}/models/test_{name}" for name in ("build", "cnn", "conv", "hf", "mup", "trans")),
    f"{UNIT}/models/test_adapter",
    *(f"{UNIT}/test_{name}" for name in ("clipping", "gradient_noise", "quantize")),
    f"{UNIT}/parallel/test_pipeline_stages",
    f"{WHOLE}/test_adaptive_precision",
)
"""Tests that train by hand: all tensors that they make are the device's."""

TASKS = tuple(
    f"{UNIT}/tasks/test_{task}"
    for task in ("image", "keyword", "language", "recommend", "seq2seq", "tabular", "text")
)
"""Tests that train tasks by hand: what a task builds and collates is moved to the device."""

GIVEN_ON_HOST = (
    *("a_model_with_other_outputs", "a_model_with_other_scores", "knowing_nothing_costs"),
    *("label_smoothing_enters", "ones_own_module_gets", "pretrained_weights_get"),
    *("training_images_are_normalised", "what_a_model_writes_after", "wrong_answers_are_counted"),
)
"""But for those that give models and scorers tensors of their own: they stay on the CPU."""

_HOST_ONLY = (
    "compressed, local and own sums take gradients of the CPU only; the engine refuses others"
)
_KERAS = "Keras chooses its device itself, among those that it knows"
_LOADED = "weights are loaded on the host; the engine moves the model"
_INT8 = "INT8 models are loaded, and answer, on the CPU"
DOES_NOT_APPLY: dict[str, str] = {
    f"{UNIT}/models/test_keras": _KERAS,
    f"{UNIT}/tasks/test_python_objects.py::test_a_live_keras": _KERAS,
    f"{UNIT}/tasks/test_image_classification.py::test_a_keras_model": _KERAS,
    f"{UNIT}/models/test_hf.py::test_a_directory_is": _LOADED,
    f"{UNIT}/models/test_hf.py::test_a_head_for_other": _LOADED,
    f"{UNIT}/precision/test_adaptive.py::test_a_compiled_model": "it is compiled for no such device",
    f"{UNIT}/test_quantize.py::test_fine_tuning_for_int8": _INT8,
    f"{UNIT}/test_quantize.py::test_the_int8_model": _INT8,
    f"{UNIT}/test_quantize.py::test_tied_heads": _INT8,
    f"{RANKS}/test_local.py": _HOST_ONLY,
    f"{RANKS}/test_servers.py": _HOST_ONLY,
    f"{RANKS}/test_transport_faults.py": _HOST_ONLY,
    f"{RANKS}/test_communication.py::test_compressed_ways": _HOST_ONLY,
    f"{RANKS}/test_communication.py::test_local_ways": _HOST_ONLY,
    f"{RANKS}/test_communication.py::test_workers_of_a_site": _HOST_ONLY,
    f"{RANKS}/test_communication.py::test_all_stop_before": _HOST_ONLY,
    f"{RANKS}/test_communication.py::test_survivors_go_back": _HOST_ONLY,
}
"""Beginning of a test's id → why it says nothing about an accelerator."""


@dataclass(frozen=True)
class Selection:
    """Tests that run together, in one pytest."""

    arguments: tuple[str, ...]
    devices: int = 2
    has_float64: bool = False
    """Only for tests that make such tensors themselves, or use torch's loss scaler: it inverts in float64."""


CORE = {
    "by hand": Selection(
        (
            *(f"{UNIT}/precision/test_{name}.py" for name in ("autocast", "adaptive")),
            f"{UNIT}/memory/test_gradient_release.py",
            f"{UNIT}/asynchronous/test_asynchronous.py",
            f"{UNIT}/tasks/test_python_objects.py::test_train_takes_live_objects_and_returns_the_run",
        ),
        has_float64=True,
    ),
    "layouts": Selection(
        (
            *(
                f"{RANKS}/test_parity.py::test_every_layout_trains_as_one_process_does[{layout}]"
                for layout in (
                    "dp3",
                    "dp2-zero1",
                    "fsdp2",
                    "tp2-sp-vocabulary",
                    "pp2-1f1b",
                    "pp2xfsdp2xtp2",
                )
            ),
            f"{RANKS}/test_resize.py",
            f"{RANKS}/test_checkpoint_reshard.py",
            f"{RANKS}/test_gradients.py::test_after_a_lost_member_the_same_weights_go_on_with_another_group",
        )
    ),
    "runs": Selection(
        (
            f"{WHOLE}/test_kill_and_resume.py::test_a_run_killed_again_and_again_ends_like_the_undisturbed_one",
            f"{WHOLE}/test_export.py::test_weights_come_out_in_full_precision_with_a_card",
        ),
        devices=1,
    ),
    "elastic": Selection(
        (
            f"{RANKS}/test_worker_groups.py::test_a_model_that_is_cut_up_survives_a_kill_and_a_resize",
        ),
        devices=4,
    ),
}
"""What ``make test`` runs, by what it is about."""

ROOMS = {
    "unit": Selection((UNIT,), has_float64=True),
    "distributed": Selection((RANKS,), devices=4),
    "integration": Selection((WHOLE,), devices=1),
}


@dataclass(frozen=True)
class Outcomes:
    """What the tests of one pytest came to, by their ids."""

    code: int
    output: str
    tests: dict[str, dict[str, object]]

    @property
    def training(self) -> list[str]:
        """Tests that trained, or failed."""
        return [
            name
            for name, found in self.tests.items()
            if found["outcome"] == "failed"
            or (found["outcome"] == "passed" and found["trained_on"])
        ]

    @property
    def on_device(self) -> list[str]:
        """Tests that passed and trained on the device."""
        return [
            name
            for name in self.training
            if self.tests[name]["outcome"] == "passed"
            and KIND in str(self.tests[name]["trained_on"])
        ]

    def describe(self) -> str:
        """The figure, and the tests that are missing in it."""
        missing = sorted(set(self.training) - set(self.on_device))
        left_out = [name for name in self.tests if reason_against(name)]
        counts = f"{len(self.on_device)} of {len(self.training)} training tests ran on the device"
        lines = [f"{counts}; {len(left_out)} do not apply"]
        for name in missing:
            found = self.tests[name]
            lines.append(f"  {name}: {found['outcome']}, trained on {found['trained_on']}")
        return "\n".join(lines)


def reason_against(name: str) -> str:
    """Why a test does not apply; nothing if it does."""
    return next((why for start, why in DOES_NOT_APPLY.items() if name.startswith(start)), "")


def run_tests(
    folder: Path,
    arguments: Sequence[str],
    *,
    devices: int = 2,
    has_float64: bool = False,
    **settings: str,
) -> Outcomes:
    """Run tests on pretend devices; ``folder`` takes their logs."""
    logs = {
        "PRETEND_BACKWARD_LOG": str(folder / "backward"),
        "PRETEND_RACE_LOG": str(folder / "races"),
        "PRETEND_REPORT": str(folder / "report.json"),
    }
    strict = {"PRETEND_POISON": "1", "PRETEND_NO_FLOAT64": str(int(not has_float64))}
    env = environment(devices=devices, memory=1 << 30, name=KIND, **strict, **logs, **settings)
    env |= {"YUNLU_TEST_DEVICE": KIND, "YUNLU_ACCELERATORS": f"{KIND}:{devices}"}
    plugins = ("-p", "tests.pretend.on_device", "-p", "no:cacheprovider", "-p", "no:xdist")
    # Torch's reduced losses resize their own result on devices of other makers, and warn of it.
    quiet = ("-W", "ignore:An output with one or more elements was resized:UserWarning")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=short", *plugins, *quiet, *arguments],
        cwd=ROOT,
        env={key: value for key, value in env.items() if not key.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        check=False,
    )
    report = folder / "report.json"
    assert report.exists(), done.stdout + done.stderr
    tests = json.loads(report.read_text())
    return Outcomes(code=done.returncode, output=done.stdout + done.stderr, tests=tests)
