"""Asking a language model over real HTTP: deadlines, refusals, waits, what is judged and what a reply costs."""

import os
import time
from pathlib import Path

import pytest
from llm_server import Answer, LanguageModelServer, refusal
from tests_support import target, verdict

from agent.errors import BudgetReachedError, InputError, ProviderError, StopRequestedError
from agent.proposers import llm_keys
from agent.proposers.llm import LlmProposer
from agent.proposers.llm_models import in_order
from agent.proposers.prompt import estimated_tokens
from agent.proposers.tactics import bottleneck, catalogue, next_tactic
from agent.records import (
    Allowance,
    Attempt,
    Brief,
    Candidate,
    InvalidReply,
    LanguageModel,
    Llm,
    Move,
    Outcome,
    Plan,
    RowStatus,
)
from harness.records import Status

DATA = Path(__file__).resolve().parent.parent / "kernels"
KERNEL = "def kernel_fn(x):\n    return x + 1\n"
GOOD = Answer(f"HYPOTHESIS: fewer bytes\nEXPECTED GAIN: 1.2x\n```python\n{KERNEL}```\n")
PRICED = "openai/gpt-4o-mini"


def brief(**changes):
    values = {
        "target": target("a", 0.5), "device": "cpu", "device_name": "EPYC", "peaks": {"copy_bytes_per_s": 2e10},
        "incumbent_source": None, "incumbent_backend": None, "attempts": (), "program": "Prefer simple code.",
        "number": 1,
    }  # fmt: skip
    return Brief(**{**values, **changes})


def proposer(*urls, model=PRICED, stop=lambda: False, folder=None, said=None, environment=None, **settings):
    models = tuple(LanguageModel(f"{model}{'' if len(urls) == 1 else place}", url) for place, url in enumerate(urls))
    limits = {"first_token_timeout_s": 5.0, "stall_timeout_s": 5.0, "call_timeout_s": 15.0, **settings}
    say = (said if said is not None else []).append
    environment = dict(os.environ) if environment is None else environment
    return LlmProposer(Llm(models, **limits), data=DATA, stop=stop, folder=folder, say=say, environment=environment)


def asked(*answers, settings=None, **changes):
    """One proposal from a server with those answers, and the server."""
    with LanguageModelServer(answers) as server:
        return proposer(server.url, **(settings or {})).propose(brief(**changes)), server


def attempt(number, status, *, tactic="one_pass", source=KERNEL, detail="why", proposed_by="llm"):
    judged = verdict(Status(status.value)) if status in {RowStatus.KEEP, RowStatus.DISCARD} else None
    if status in {RowStatus.INCORRECT, RowStatus.CRASH}:
        from dataclasses import replace

        judged = replace(verdict(Status(status.value)), detail=detail)
    return Attempt(number, "", source, "cpp", tactic, f"idea {number}", status, judged, proposer=proposed_by)


# What is proposed


def test_a_reply_becomes_a_candidate_with_its_hypothesis_usage_and_price():
    proposal, server = asked(GOOD)
    assert isinstance(proposal, Candidate)
    assert (proposal.source, proposal.proposer, proposal.tactic) == (KERNEL, "llm", "translate")
    assert proposal.hypothesis == "fewer bytes (expected 1.2x)"
    assert (proposal.usage.tokens, proposal.usage.calls, proposal.usage.model) == (1100, 1, PRICED)
    assert proposal.usage.cost_usd == pytest.approx(1000 * 0.15e-6 + 100 * 0.6e-6)
    assert "Prefer simple code." in proposal.prompt
    assert proposal.prompt == server.prompt()
    assert server.requests[0]["stream"] is True


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer("No, thank you."), "no kernel_fn in the reply"),
        (Answer(f"```python\n{KERNEL}```", finish="length"), "cut off at its limit of tokens"),
        (Answer(f"```python\n{KERNEL}```", finish=None, usage=None), "without a finish_reason"),
        (Answer(f"```python\n{KERNEL}```", finish=None, usage=None, done=False), "without a finish_reason"),
        (Answer("", finish="content_filter"), "content filter"),
        (Answer("y" * 2_000_000), "longer than a megabyte"),
    ],
)
def test_what_is_no_whole_kernel_is_an_invalid_reply_and_never_a_candidate(answer, words):
    proposal, server = asked(answer)
    assert isinstance(proposal, InvalidReply)
    assert words in proposal.reason
    assert proposal.usage.calls == len(server.requests) == 1


@pytest.mark.parametrize(
    "empty", [Answer("", reasoning="let me think " * 50), Answer(None), Answer("<think>hm</think>")]
)
def test_an_answer_without_text_is_asked_for_again_with_more_room(empty):
    proposal, server = asked(empty, GOOD, settings={"max_tokens": 1000})
    assert isinstance(proposal, Candidate)
    assert [one["max_tokens"] for one in server.requests] == [1000, 2000]
    assert (proposal.usage.calls, proposal.usage.tokens) == (2, 2200)


def test_a_model_that_only_thinks_is_refused_after_a_bounded_number_of_calls():
    proposal, server = asked(Answer("", reasoning="hm " * 50))
    assert isinstance(proposal, InvalidReply)
    assert "characters of reasoning" in proposal.reason
    assert proposal.usage.calls == len(server.requests) == 3


def test_thoughts_in_front_of_the_answer_are_not_read_as_the_answer():
    draft = "<think>\n```python\ndef kernel_fn(x):\n    return 0\n```\n</think>\n"
    proposal, _ = asked(Answer(draft + GOOD.text))
    assert proposal.source == KERNEL


def test_a_server_that_does_not_stream_is_understood():
    import json

    whole = {"id": "x", "object": "chat.completion", "created": 1, "model": "m",
             "choices": [{"index": 0, "message": {"role": "assistant", "content": GOOD.text}, "finish_reason": "stop"}],
             "usage": {"prompt_tokens": 900, "completion_tokens": 50, "total_tokens": 950}}  # fmt: skip
    proposal, _ = asked(Answer(body=json.dumps(whole)))
    assert isinstance(proposal, Candidate)
    assert proposal.usage.tokens == 950


# Refusals and waits


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (refusal(401, "Incorrect API key provided", "invalid_api_key"), "Incorrect API key"),
        (refusal(402, "Payment required"), "Payment required"),
        (refusal(403, "Not yours"), "Not yours"),
        (refusal(404, "no such model", "model_not_found"), "/v1 at its end"),
        (refusal(429, "You exceeded your current quota", "insufficient_quota"), "exceeded your current quota"),
        (refusal(429, "no more", "insufficient_quota"), "no more"),
        (refusal(400, "temperature is odd"), "temperature is odd"),
    ],
)
def test_what_asking_again_cannot_mend_stops_at_once_with_the_reason(answer, words):
    with LanguageModelServer([answer]) as server:
        with pytest.raises(ProviderError, match=words):
            proposer(server.url).propose(brief())
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        refusal(429, "slow down", "rate_limit_exceeded", Retry_After="1"),
        refusal(500, "oops"),
        refusal(529, "overloaded"),
        Answer(status=502, body="<html>Bad Gateway</html>", content_type="text/html"),
        Answer(body="<html>log in</html>", content_type="text/html"),
        Answer(GOOD.text, reset_after=0),
        Answer(GOOD.text * 20, reset_after=3),
        Answer(body='data: {"error": {"message": "boom"}}\n\n', content_type="text/event-stream"),
        Answer(body="data: {not json}\n\n", content_type="text/event-stream"),
    ],
    ids=["429", "500", "529", "502 page", "200 page", "reset", "reset in the middle", "error in the stream", "garbage"],
)
def test_what_may_pass_is_waited_for_and_costs_no_experiment(answer):
    failing = [answer]

    def script(_body, _index):
        return failing.pop() if failing else GOOD

    said = []
    with LanguageModelServer(script) as server:
        if answer.content_type == "text/html" and answer.status == 200:
            failing.append(answer)  # such a server is asked once more without streaming
        proposal = proposer(server.url, said=said).propose(brief())
    assert isinstance(proposal, Candidate)
    assert proposal.usage.calls == 1
    assert any("Waiting" in line for line in said)


def test_retry_after_is_honoured():
    said = []
    answers = [refusal(429, "slow down", "rate_limit_exceeded", Retry_After="2"), GOOD]
    with LanguageModelServer(answers) as server:
        one = proposer(server.url, said=said)
        one._provider.prices(PRICED)  # imports litellm before the clock starts
        began = time.monotonic()
        one.propose(brief())
        assert time.monotonic() - began >= 2
    assert "Waiting 2 s" in said[0]


def test_a_wait_beyond_the_cap_stops_with_what_was_asked_for():
    with (
        LanguageModelServer([refusal(429, "slow down", "rate_limit", Retry_After="3600")]) as server,
        pytest.raises(ProviderError, match="asks to wait 3600 s"),
    ):
        proposer(server.url).propose(brief())


@pytest.mark.parametrize(
    ("answer", "limits", "words"),
    [
        (Answer("x", wait_s=60), {"first_token_timeout_s": 1.0}, "no first token within 1 s"),
        (Answer("x" * 4000, drip_s=60), {"stall_timeout_s": 1.0}, "stalled for 1 s"),
        (Answer("x" * 400_000, drip_s=0.2), {}, "not finished within"),
    ],
    ids=["sleeps", "stalls", "drips"],
)
def test_one_cap_ends_a_call_with_all_its_tries(answer, limits, words):
    with LanguageModelServer([answer]) as server:
        one = proposer(server.url, call_timeout_s=3.0, **limits)
        one._provider.prices(PRICED)
        began = time.monotonic()
        with pytest.raises(ProviderError, match=words):
            one.propose(brief())
        assert time.monotonic() - began < 3.0 + 4.0
        assert len(server.requests) <= 4


def test_a_stop_ends_waiting_for_a_reply_within_a_moment():
    asked_for = []
    with LanguageModelServer([Answer("x", wait_s=60)]) as server:
        one = proposer(server.url, stop=lambda: bool(server.requests), call_timeout_s=60.0, said=asked_for)
        one._provider.prices(PRICED)
        began = time.monotonic()
        with pytest.raises(StopRequestedError):
            one.propose(brief())
        assert time.monotonic() - began < 10


def test_nobody_at_the_address_is_said_after_a_few_tries():
    with LanguageModelServer([GOOD]) as server:
        url = server.url
    with pytest.raises(ProviderError, match=r"Nobody answers at http://127\.0\.0\.1"):
        proposer(url, call_timeout_s=60.0).propose(brief())


def test_a_prompt_that_does_not_fit_is_shortened_until_it_does():
    def script(body, _index):
        size = estimated_tokens(body["messages"][0]["content"])
        return (
            GOOD if size < 14_000 else refusal(400, "maximum context length is 14000 tokens", "context_length_exceeded")
        )

    said = []
    with LanguageModelServer(script) as server:
        proposal = proposer(server.url, said=said).propose(brief(program="Mind the words. " * 20_000))
    assert isinstance(proposal, Candidate)
    assert any("shortened to 12000 tokens" in line for line in said)


def test_a_second_model_goes_on_when_the_first_refuses():
    with LanguageModelServer([refusal(401, "bad key")]) as one, LanguageModelServer([GOOD]) as other:
        said = []
        both = proposer(one.url, other.url, said=said)
        proposals = [both.propose(brief(number=number)) for number in (1, 2, 3)]
        assert all(isinstance(proposal, Candidate) for proposal in proposals)
        assert len(one.requests) <= 1
        assert len(other.requests) == 3


# Budgets, prices, truncation


def test_an_unpriced_model_costs_unknown_and_that_is_noted():
    proposal, _ = asked(GOOD, settings={"model": "my-own-model"})
    assert proposal.usage.cost_usd is None
    assert proposal.usage.tokens == 1100
    assert "the price of my-own-model is unknown" in proposal.usage.notes[0]


def test_a_server_that_cuts_prompts_silently_is_found_out():
    proposal, _ = asked(Answer(GOOD.text, usage=(300, 100)), program="Mind every one of these words. " * 200)
    assert any("cuts prompts silently" in note for note in proposal.usage.notes)
    whole, _ = asked(Answer(GOOD.text, usage=(1700, 100)), program="Mind every one of these words. " * 200)
    assert not any("cuts prompts" in note for note in whole.usage.notes)


def test_usage_that_is_not_said_is_estimated():
    proposal, server = asked(Answer(GOOD.text, usage=None))
    counted = estimated_tokens(server.prompt())
    assert 0.7 * counted < proposal.usage.prompt_tokens < 1.3 * counted  # litellm counts, or we do
    assert proposal.usage.completion_tokens > 10


def test_the_last_dollars_pay_for_a_shorter_reply_and_then_nothing():
    _, server = asked(GOOD, settings={"max_tokens": 100_000}, allowance=Allowance(dollars=0.006))
    assert 4096 <= server.requests[0]["max_tokens"] < 10_000
    with LanguageModelServer([GOOD]) as server, pytest.raises(BudgetReachedError):
        proposer(server.url).propose(brief(allowance=Allowance(calls=0)))


def test_retries_stop_at_the_budget_of_calls():
    proposal, server = asked(Answer("", reasoning="hm " * 50), allowance=Allowance(calls=1))
    assert isinstance(proposal, InvalidReply)
    assert len(server.requests) == 1


def test_what_was_bought_is_not_bought_again(tmp_path):
    with LanguageModelServer([GOOD]) as server:
        first = proposer(server.url, folder=tmp_path).propose(brief())
        again = proposer(server.url, folder=tmp_path).propose(brief())
        assert again == first
        assert len(server.requests) == 1
        proposer(server.url, folder=tmp_path).propose(brief(number=2))
        assert len(server.requests) == 2


# Keys


def test_a_key_is_never_sent_to_a_server_that_it_was_not_named_for(tmp_path):
    secret = "sk-proj-0123456789abcdef"
    environment = {**os.environ, "OPENAI_API_KEY": secret, "OTHER_KEY": "the-servers-own-key"}
    with LanguageModelServer([GOOD]) as server:
        one = proposer(server.url, environment=environment, folder=tmp_path)
        proposal = one.propose(brief(program=f"My key is {secret}."))
        sent = {name.lower(): value for name, value in server.headers[0].items()}
        assert secret not in str(sent)
        assert secret not in server.prompt()
        assert "[hidden]" in server.prompt()
        assert secret not in (tmp_path / "llm-pending.json").read_text() + proposal.prompt
        named = LlmProposer(
            Llm((LanguageModel(PRICED, server.url, 1.0, "OTHER_KEY"),)), data=DATA, environment=environment
        )
        named.propose(brief())
        assert "the-servers-own-key" in str(server.headers[1])


def test_a_key_that_a_provider_repeats_is_hidden_from_the_message():
    secret = "sk-proj-0123456789abcdef"
    environment = {**os.environ, "OPENAI_API_KEY": secret}
    with (
        LanguageModelServer([refusal(401, f"Incorrect API key provided: {secret}")]) as server,
        pytest.raises(ProviderError) as raised,
    ):
        proposer(server.url, environment=environment).propose(brief())
    assert secret not in str(raised.value)
    assert "[hidden]" in str(raised.value)


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ((), "needs a model"),
        ((LanguageModel("gpt-4o"),), "export OPENAI_API_KEY"),
        ((LanguageModel("anthropic/claude-x"),), "export ANTHROPIC_API_KEY"),
        ((LanguageModel("m", "127.0.0.1:8000"),), "must be a URL"),
        ((LanguageModel("m", "http://"),), "must be a URL"),
        ((LanguageModel(" ", "http://x/v1"),), "names no model"),
        ((LanguageModel("m", "http://x/v1", 1.0, "MISSING_KEY"),), "MISSING_KEY .api_key_env. is not set"),
        ((LanguageModel("m", "http://x/v1", 1.0, "HOME"),), "HOME is not named like a key"),
        ((LanguageModel("m", "http://x/v1", 1.0, "sk-abc-def"),), "never the key itself"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_starts(models, words):
    with pytest.raises(InputError, match=words):
        llm_keys.check(models, {})


def test_a_local_server_or_a_present_key_is_enough():
    llm_keys.check((LanguageModel("m", "http://127.0.0.1:1/v1"),), {})
    llm_keys.check((LanguageModel("gpt-4o"),), {"OPENAI_API_KEY": "x"})
    assert llm_keys.present({"OPENAI_API_KEY": "secret"}) == (("OPENAI_API_KEY", "openai/MODEL"),)


# Tactics, repairs, models


def test_a_failure_is_repaired_twice_with_the_judges_words_and_no_tolerance():
    detail = "wrong on small rows: element (3, 7) off by 0.25 is 31.4 times what is allowed"
    failed = attempt(1, RowStatus.INCORRECT, detail=detail)
    proposal, server = asked(GOOD, attempts=(failed,))
    assert proposal.tactic == "one_pass~1"
    assert "The file to repair" in server.prompt()
    assert "element (3, 7) off by 0.25 is more than is allowed" in server.prompt()
    assert "31.4" not in server.prompt()
    again = attempt(2, RowStatus.CRASH, tactic="one_pass~1")
    assert asked(GOOD, attempts=(failed, again))[0].tactic == "one_pass~2"
    third = attempt(3, RowStatus.INCORRECT, tactic="one_pass~2")
    assert "~" not in asked(GOOD, attempts=(failed, again, third))[0].tactic


def test_edits_of_the_kept_kernel_are_applied():
    edit = "HYPOTHESIS: x\n<<<<<<< SEARCH\n    return x + 1\n=======\n    return x + 2\n>>>>>>> REPLACE\n"
    kept = attempt(1, RowStatus.KEEP)
    proposal, _ = asked(
        Answer(edit), attempts=(kept,), incumbent_source=KERNEL, incumbent_backend="cpp", plan=Plan(Move.EDIT, kept)
    )
    assert proposal.source == KERNEL.replace("+ 1", "+ 2")


def test_every_tactic_says_what_it_is_for_and_how_on_its_devices():
    tactics = catalogue(DATA / "tactics")
    assert len(tactics) >= 20
    for one in tactics:
        assert one.hypothesis
        assert one.cost in {"low", "medium", "high"}
        assert one.name == "simplify" or any(one.how(device) for device in one.devices or ("cuda", "cpu"))


def test_the_first_of_a_target_is_a_translation_and_then_tactics_fit_the_bottleneck():
    tactics = catalogue(DATA / "tactics")
    assert next_tactic(brief(), tactics, has_base=False).name == "translate"
    chosen = {
        next_tactic(brief(history=(outcome(n, RowStatus.DISCARD),) * n), tactics, has_base=True) for n in range(40)
    }
    assert len(chosen) > 3
    assert all(one.applies(target("a", 0.5), "cpu", "memory") for one in chosen)


def outcome(number, status, tactic="one_pass", model=PRICED, cost=0.001):
    return Outcome(number, "b", "pointwise", tactic, "idea", model, status, 1.2, cost)


def test_a_tactic_that_wins_is_tried_more_and_the_choice_is_the_same_after_a_resume():
    tactics = catalogue(DATA / "tactics")
    wins = tuple(outcome(n, RowStatus.KEEP, "vectorise") for n in range(30))
    assert next_tactic(brief(history=wins), tactics, has_base=True).name == "vectorise"
    assert len({next_tactic(brief(history=wins[:3]), tactics, has_base=True).name for _ in range(5)}) == 1


def test_the_bottleneck_follows_the_roofline():
    from dataclasses import replace

    peaks = {"copy_bytes_per_s": 1e10, "matmul_float32_flops": 1e11}
    assert bottleneck(replace(target("a", 0.5), launch_bound=True), peaks) == "launch"
    assert bottleneck(replace(target("a", 0.5), bytes=1000, flops=10**6), peaks) == "compute"
    assert bottleneck(replace(target("a", 0.5), bytes=1000, flops=1000), peaks) == "memory"


def test_the_model_that_wins_for_its_money_is_asked_more_often():
    cheap, dear = LanguageModel("cheap"), LanguageModel("dear")
    history = [outcome(n, RowStatus.DISCARD, model="dear", cost=1.0) for n in range(10)]
    history += [outcome(n, RowStatus.KEEP, model="cheap", cost=0.01) for n in range(5)]
    first = [in_order((cheap, dear), history, str(n))[0].model for n in range(50)]
    assert first.count("cheap") > 45
    even = [in_order((cheap, dear), [], str(n))[0].model for n in range(200)]
    assert 60 < even.count("cheap") < 140
    heavy = [in_order((LanguageModel("cheap", weight=10.0), dear), [], str(n))[0].model for n in range(200)]
    assert heavy.count("cheap") > 180
