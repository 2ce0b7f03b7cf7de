"""`inspect` on the packaged pair: the operator's table is what the files say."""

from __future__ import annotations

from importlib import resources

from speccache_api.geometry import Inspection, builtin_facts
from speccache_runtime.config import builtin_directory


def test_table_of_packaged_models_is_current(run_cli):
    """Made anew with: speccache-runtime inspect --builtin > crds/speccache_api/builtin.json."""
    answer = run_cli("inspect", "--builtin")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == resources.files("speccache_api").joinpath("builtin.json").read_text()


def test_inspection_job(run_cli, tmp_path):
    """The termination message is what the operator parses, and standard output stays empty."""
    target, draft = (builtin_directory("tiny", half) for half in ("target", "draft"))
    message = tmp_path / "message"
    answer = run_cli("inspect", "--target", target, "--draft", draft, "--termination-message", message)
    assert (answer.returncode, answer.stdout) == (0, "")
    assert Inspection.from_json(message.read_text()) == builtin_facts("tiny")


def test_target_alone(run_cli):
    """On standard output, when nobody asks for a message."""
    answer = run_cli("inspect", "--target", builtin_directory("tiny", "target"))
    assert Inspection.from_json(answer.stdout).draft is None


def test_a_draft_of_ones_own_for_the_packaged_target(run_cli):
    """What the inspection Job runs when only the draft is on a claim: the target is named by its URI."""
    answer = run_cli("inspect", "--target", "builtin://tiny", "--draft", builtin_directory("tiny", "draft"))
    assert Inspection.from_json(answer.stdout) == builtin_facts("tiny")


def test_a_packaged_model_that_does_not_exist(run_cli):
    answer = run_cli("inspect", "--target", "builtin://no")
    assert answer.returncode == 1
    assert "builtin://no" in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_draft_that_does_not_fit(run_cli):
    """The pair is checked here, before any pod exists; a target is not a draft."""
    target = builtin_directory("tiny", "target")
    answer = run_cli("inspect", "--target", target, "--draft", target)
    assert answer.returncode == 1
    assert answer.stderr.count("\n") == 1
