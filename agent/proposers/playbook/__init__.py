"""The playbook: known kernels, fused kernels and numeric sweeps, without a language model or a network."""

from agent.proposers.playbook.playbook import Playbook

__all__ = ["Playbook"]
