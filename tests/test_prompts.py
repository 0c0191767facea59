"""The prompt: three golden ones, bounded in tokens, and nothing in it that gives the judge away."""

from dataclasses import replace

import pytest
from prompt_cases import CASES, GOLDEN, norm

from agent.proposers.prompt import estimated_tokens, learned, prompt_for
from agent.records import LibraryPolicy, Move, Outcome, Plan, RowStatus


@pytest.mark.parametrize("name", CASES)
def test_the_prompts_are_the_golden_ones(name):
    golden = (GOLDEN / f"{name}.md").read_text(encoding="utf-8")
    assert prompt_for(*CASES[name]()) == golden, "read the change, then `python tests/prompt_cases.py`"


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_holds_what_a_kernel_engineer_needs_and_no_tolerance(name):
    text = prompt_for(*CASES[name]())
    given, _ = CASES[name]()
    for spec in (*given.target.inputs, *given.target.outputs):
        assert f"- {spec.name}: {spec.dtype}" in text
        assert f"strides {list(spec.stride)}" in text
    assert given.target.reference.strip() in text
    assert f"{given.target.share:.1%} of the model's time" in text
    assert f"roofline floor is {given.target.floor_us:.1f}" in text
    assert "times what is allowed" not in text
    assert "seed" not in text.replace("random seed", "")


@pytest.mark.parametrize("tokens", [3000, 6000, 12_000])
def test_a_prompt_stays_within_its_tokens_and_keeps_the_task(tokens):
    given, task = norm()
    given = replace(given, program="Mind this. " * 9000, attempts=given.attempts * 5)
    text = prompt_for(given, replace(task, tokens=tokens))
    assert estimated_tokens(text) <= tokens * 1.1
    assert given.target.reference.strip() in text
    assert "# Your answer" in text
    assert "What to try now" in text


def test_library_calls_are_allowed_or_not():
    given, task = norm()
    assert "calls of torch's operators and of libraries are refused" in prompt_for(
        replace(given, library_calls=LibraryPolicy.FORBID), task
    )


def test_the_best_attempts_and_the_last_failures_are_lines():
    given, task = norm()
    text = prompt_for(given, task)
    assert "- keep 1.12x (10.1 µs): [one_pass] one pass, a row in registers" in text
    assert (
        "(stability: wrong on values of scale 1e-3: output 1 off by 0.0078 at (0, 17, 3) is more than is allowed)"
        in text
    )
    assert "silu_mul_1 [loads_in_flight]: keep 1.06x" in text


def test_two_kernels_are_merged_when_the_search_says_so():
    given, task = norm()
    other = replace(given.attempts[1], source="def kernel_fn():\n    other_kernel()\n")
    text = prompt_for(replace(given, plan=Plan(Move.MERGE, given.attempts[0], other)), task)
    assert "make one of the best of both" in text
    assert "other_kernel()" in text


def test_learned_notes_tell_each_idea_with_its_outcome():
    one = Outcome(1, "a", "norm", "one_pass", "fewer bytes", "m", RowStatus.KEEP, 1.3, 0.1)
    two = Outcome(
        2, "b", "norm", "flash", "", "m", RowStatus.INCORRECT, None, 0.1, "off by 3 is 9 times what is allowed"
    )
    text = learned((one, two))
    assert "- a [one_pass]: keep 1.30x: fewer bytes" in text
    assert "- b [flash]: incorrect: off by 3 is more than is allowed" in text
