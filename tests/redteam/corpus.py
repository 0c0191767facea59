"""Reads the red-team corpora: whole kernel files whose first lines say what must happen to them."""

from dataclasses import dataclass
from pathlib import Path

from harness.records import JudgeRequest, LibraryPolicy, Verdict

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Specimen:
    """One file: `expect` is a stage or a guard for a cheat, empty for an honest kernel."""

    name: str
    source: str
    target: str
    expect: str
    policy: LibraryPolicy
    device: str

    def request(self, *, bench: bool, device: str) -> JudgeRequest:
        return JudgeRequest(self.target, self.source, device=device, library_calls=self.policy, bench=bench)

    @property
    def by_chance(self) -> int:
        """1 where one lucky secret draw in a hundred may let it pass once (it says `# chance:` why), else 0."""
        return int("\n# chance: " in self.source)

    def caught(self, verdict: Verdict) -> bool:
        """Refused, for the reason that the file names, or for one of them where chance decides which comes first."""
        return not verdict.accepted and bool({verdict.stage, verdict.guard} & set(self.expect.split(" or ")))


def specimens(kind: str) -> list[Specimen]:
    """All files of `cheats` or `honest`."""
    return [_read(path) for path in sorted((FOLDER / kind).glob("*.py"))]


def _read(path: Path) -> Specimen:
    source = path.read_text()
    header = dict(
        line[2:].split(": ", 1) for line in source.splitlines()[:5] if line.startswith("# ") and ": " in line
    )
    return Specimen(
        path.stem,
        source,
        header.get("target", "softmax").strip(),
        header.get("expect", "").strip(),
        LibraryPolicy(header.get("policy", "allow").strip()),
        header.get("device", "any").strip(),
    )
