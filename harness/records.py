"""What crosses process borders: targets, requests, verdicts, reports.

Plain frozen dataclasses without torch, so that the agent, the judge and a test read the same nouns. `harness.wire`
turns them into JSON and back (parsed once, at the door). Times carry their unit in the name; sizes are bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

NAMED_OPS = (
    "softmax",
    "reduce",
    "layernorm",
    "rmsnorm",
    "matmul",
    "flash_attention",
    "fused_mlp",
    "cross_entropy",
    "rotary_embedding",
)
BACKENDS = ("triton", "cuda", "cpp", "library")
SHORT_DTYPES: Mapping[str, str] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}

Scalar = bool | int | float | str | None


class Role(StrEnum):
    """What an input of a target is to the model that contains it."""

    ACTIVATION = "activation"
    WEIGHT = "weight"
    INDEX = "index"
    MASK = "mask"


class StageName(StrEnum):
    """The five stages and the benchmark, in the order in which they run."""

    SMOKE = "smoke"
    SHAPES = "shapes"
    STABILITY = "stability"
    DETERMINISM = "determinism"
    EDGE = "edge"
    BENCHMARK = "benchmark"


class StageStatus(StrEnum):
    """How one stage ended."""

    PASS = "pass"  # noqa: S105 - a verdict, not a password
    FAIL = "fail"
    NOT_RUN = "not_run"


class Status(StrEnum):
    """The judge's verdict on one candidate (contracts: Verdict)."""

    KEEP = "keep"
    DISCARD = "discard"
    INCORRECT = "incorrect"
    CRASH = "crash"
    TIMEOUT = "timeout"
    CHEAT = "cheat"
    ENVIRONMENT = "environment"


class Blame(StrEnum):
    """Whose fault a failure is."""

    CANDIDATE = "candidate"
    ENVIRONMENT = "environment"
    OURS = "ours"


class LibraryPolicy(StrEnum):
    """Whether a candidate may answer with library calls (cuBLAS, SDPA) or must do the work itself."""

    ALLOW = "allow"
    FORBID = "forbid"


@dataclass(frozen=True)
class ValueStatistics:
    """What the captured run saw in one tensor; integers give `low` and `high` (inclusive)."""

    mean: float
    std: float
    low: float
    high: float


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a target. `dims` names what varies: an int is fixed, a name is a symbol of `Target.bindings`."""

    name: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dims: tuple[int | str, ...]
    values: ValueStatistics | None = None

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.stride) == len(self.dims):
            raise ValueError(
                f"{self.name}: shape {self.shape}, stride {self.stride} and dims {self.dims} differ in rank"
            )


@dataclass(frozen=True)
class OpNode:
    """One operation of a region in execution order, as readable Python.

    `op` is a canonical name (`add`, `mul`, `mean`, `rsqrt`, `silu`, `to`, `view`, `getitem`, `matmul`, `softmax`, ...);
    each argument is Python source: the name of an input or an earlier node, or a literal.
    """

    name: str
    op: str
    args: tuple[str, ...]
    kwargs: tuple[tuple[str, str], ...]
    dtype: str | None
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class CallSite:
    """Where a target occurs in the model."""

    graph: int
    module: str  # e.g. "model.layers.3.input_layernorm"
    source: str  # e.g. "llama.py:88"


@dataclass(frozen=True)
class Target:
    """One replaceable region of a model, with all its call sites; structurally equal regions are one target.

    A kernel for it takes `inputs` positionally and `constants` by keyword and returns `outputs` (a tuple when there
    are several). `reference` is Python source defining `reference(<inputs>, *, <constants>)` with the original's own
    dtypes. `bindings` lists real sizes of the symbols in `dims`, the captured run's first; the kernel is checked at
    all of them. Times and FLOPs are per call, `share` is of the model's time over all call sites.
    """

    id: str
    kind: str  # "rmsnorm", "add_rmsnorm", "silu_mul", "linear", "attention", ... or "pointwise", "reduction", "other"
    title: str  # for people: "LlamaRMSNorm ×33"
    key: str
    inputs: tuple[TensorSpec, ...]
    constants: Mapping[str, Scalar]
    outputs: tuple[TensorSpec, ...]
    graph: tuple[OpNode, ...]
    results: tuple[str, ...]  # names of the graph nodes (or inputs) that are the outputs, in order
    reference: str
    bindings: tuple[Mapping[str, int], ...]
    call_sites: tuple[CallSite, ...]
    flops: int
    bytes: int
    time_us: float = 0.0
    floor_us: float = 0.0
    share: float = 0.0
    launch_bound: bool = False
    members: tuple[str, ...] = ()  # of a fusion: the target of each region it is made of; empty for the disjoint cover
    precision: str = ""  # effective: "tf32", "bf16 reduced-precision reductions", ... empty: plain

    def model_gain(self) -> float:
        """Share of the model's time that the roofline says could be saved: share × (1 - floor/time)."""
        if self.time_us <= 0:
            return 0.0
        return self.share * max(0.0, 1.0 - self.floor_us / self.time_us)


@dataclass(frozen=True)
class ModelSpec:
    """MODEL and its options, as the user gave them; paths are absolute."""

    reference: str  # FILE.py:NAME, package.module:NAME, a checkpoint folder, FILE.py
    weights: str | None = None
    model_args: Mapping[str, str] = field(default_factory=dict)
    inputs: str | None = None
    input_shapes: tuple[tuple[int, ...], ...] = ()
    device: str | None = None
    dtype: str | None = None
    trust: tuple[str, ...] = ()  # "code": a checkpoint's own Python; "pickle": objects in a .pt file


@dataclass(frozen=True)
class ProfileReport:
    """One profile of a model: targets ranked by what they could give, and what is not covered."""

    model: str
    device: str  # "cpu" or "cuda"
    device_name: str
    mode: str  # the deployed mode that was measured: "eager", "compile", "reduce-overhead"
    total_ms: float
    idle_share: float
    uncaptured_share: float
    targets: tuple[Target, ...]
    peaks: Mapping[str, float]  # measured: "copy_bytes_per_s", "matmul_float32_flops", ...
    notes: tuple[str, ...] = ()  # what was cut, refused or not captured, and why
    fingerprint: Mapping[str, str] = field(default_factory=dict)  # torch, triton, driver, device, source, weights


@dataclass(frozen=True)
class ProfileRequest:
    """Profile `model` and write its targets and their sampled activations below `folder`."""

    model: ModelSpec
    folder: str


@dataclass(frozen=True)
class JudgeRequest:
    """Judge one kernel file. `target` is a named op, or the path of a target's JSON file.

    `incumbent` is the source of the kernel it has to beat; None means the faster of eager and torch.compile.
    `shape` narrows a named op's check ({"M": 512}), `dtype` likewise. `trials` counts the candidates judged before
    on this target (the more tries, the higher the bar). `bench` False stops after the five stages.
    """

    target: str
    source: str
    incumbent: str | None = None
    device: str = "cpu"
    dtype: str | None = None
    shape: Mapping[str, int] = field(default_factory=dict)
    library_calls: LibraryPolicy = LibraryPolicy.ALLOW
    min_gain: float = 0.005
    trials: int = 0
    bench: bool = True


@dataclass(frozen=True)
class StageResult:
    """One stage of a verdict."""

    status: StageStatus
    seconds: float
    detail: str = ""


@dataclass(frozen=True)
class Timing:
    """The benchmark of one candidate, µs per call. Ratios are above 1 when the candidate is faster.

    `incumbent_us` is what it had to beat; `ci_low` and `ci_high` bound `speedup_vs_best` (95%, clustered by process);
    `noise` is the relative A/A noise of this target between fresh processes. `ratios` are the measurements behind the
    interval: incumbent ÷ candidate of each A B B A quad, one tuple for each pair of processes.
    """

    eager_us: float
    incumbent_us: float
    candidate_us: float
    speedup_vs_pytorch: float
    speedup_vs_best: float
    ci_low: float
    ci_high: float
    noise: float
    incumbent: str = ""  # "eager", "compile" or "kept"
    throughput_tflops: float | None = None
    pct_peak: float | None = None
    peak_memory_mb: float | None = None
    prepack_us: float | None = None
    clocks: str = ""  # what the GPU ran at while it was timed, and what held it back
    ratios: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The judge's whole answer on one kernel file (contracts: Verdict)."""

    accepted: bool
    status: Status
    target: str
    device: str
    stage: StageName | None
    guard: str | None
    detail: str
    blame: Blame | None
    stages: Mapping[StageName, StageResult]
    timing: Timing | None
    sandbox: tuple[str, ...]
    kernel_sha256: str

    def __post_init__(self) -> None:
        if self.accepted != (self.status in {Status.KEEP, Status.DISCARD}):
            raise ValueError(f"accepted={self.accepted} contradicts status {self.status}")
        if set(self.stages) != set(StageName):
            raise ValueError(f"a verdict names all six stages, got {sorted(self.stages)}")
        if self.status is Status.KEEP and self.timing is None:
            raise ValueError("a keep needs its timing")


@dataclass(frozen=True)
class KeptKernel:
    """A kernel that a session keeps: its target (path of the JSON file) and its source."""

    target: str
    source: str


@dataclass(frozen=True)
class VerifyRequest:
    """Measure `model` with `kernels` spliced in against the named modes, or all of them.

    `before` is what was spliced in until now, when one more kernel is on trial: the model is then timed both ways.
    """

    model: ModelSpec
    kernels: tuple[KeptKernel, ...]
    modes: tuple[str, ...] = ()
    bisect: bool = False
    before: tuple[KeptKernel, ...] | None = None


@dataclass(frozen=True)
class ModeMeasurement:
    """One way to run the whole model; `median_ms` is None when it was not run, and `reason` says why."""

    mode: str
    median_ms: float | None
    ci_low: float | None
    ci_high: float | None
    peak_memory_mb: float | None
    reason: str | None = None


@dataclass(frozen=True)
class SiteCounts:
    """How many call sites run a kept kernel, and how many fell back to the original."""

    applied: int
    fallback: int


@dataclass(frozen=True)
class ModelGain:
    """How many times faster the model runs than it does another way: a ratio of interleaved times, with its 95%."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class TextAgreement:
    """How a language model reads text with its kernels and without: teacher-forced steps at which the likeliest word
    differs, and both perplexities. `ok`: where words differ they tie, and the perplexities agree."""

    steps: int
    differing: int
    perplexity_eager: float
    perplexity: float
    ok: bool

    @property
    def top1(self) -> float:
        """The share of steps with the same likeliest word."""
        return 1.0 - self.differing / self.steps if self.steps else 0.0

    @property
    def perplexity_change(self) -> float:
        """Perplexity with the kernels ÷ eager's, minus one."""
        return self.perplexity / self.perplexity_eager - 1.0


@dataclass(frozen=True)
class VerifyReport:
    """The whole model, measured (contracts: verify)."""

    model: str
    device: str
    device_name: str
    modes: tuple[ModeMeasurement, ...]
    outputs_ok: bool
    max_error: float
    faster: bool
    model_speedup: float | None  # best of the other modes ÷ ours
    model_speedup_vs_eager: float | None
    sites: SiteCounts
    applied: Mapping[str, int] = field(default_factory=dict)  # sites per target id; 0 = not applied
    detail: str = ""
    suspects: tuple[str, ...] = ()  # bisect: targets that break or slow the model
    newest: ModelGain | None = None  # with what is kept, against without the newest kernel
    versus: Mapping[str, ModelGain] = field(default_factory=dict)  # with what is kept, against each other mode
    text: TextAgreement | None = None  # language models only


@dataclass(frozen=True)
class WrittenModel:
    """A KernelBench problem's `ModelNew` with kernels in it; `source` is empty when `reason` says why there is none."""

    source: str
    applied: Mapping[str, int] = field(default_factory=dict)  # call sites per target id
    reason: str = ""


@dataclass(frozen=True)
class Failure:
    """A request that could not be served: `kind` is "input" (exit 2), "environment" or "ours" (exit 3)."""

    kind: str
    message: str
    trace: str = ""
