"""Checks shared by the tests of the nine named ops."""

import importlib

import torch

from harness.calibration import calibrate
from harness.oracle import Oracle
from harness.problem import Problem, named_problem
from harness.records import StageName


def problem_of(op: str) -> Problem:
    return named_problem(importlib.import_module(f"harness.specs.{op}").SPEC, "cpu")


def assert_true_in_float64(op: str, plain) -> None:
    problem = problem_of(op)
    oracle = Oracle(problem)
    for case in problem.cases[StageName.SHAPES]:
        if case.constants or max(draw.extent for draw in case.inputs) > 100_000:
            continue
        question = oracle.ask(case)
        wide = [value.double() if value.is_floating_point() else value for value in question.inputs]
        truth = question.expected[0].truth
        assert truth.dtype is torch.float64
        torch.testing.assert_close(truth, plain(*wide), rtol=1e-11, atol=1e-11)


def assert_calibrated(op: str) -> None:
    problem = problem_of(op)
    calibration = calibrate(Oracle(problem))
    assert calibration.unjudgeable is None
    assert {case.dtype for case in problem.calibration} == {"float32", "bfloat16", "float16"}
