"""Keys of the section ``train``: how the processes of a job share its work."""

from __future__ import annotations

from pydantic import Field

from veomni_trainer.job.section import Section


class ParallelPlan(Section):
    """Rules that override the model's own: a module's or parameter's pattern, and how transformers shards it."""

    tp: dict[str, str] = Field(default_factory=dict)
    """For tensor parallelism."""
    ep: dict[str, str] = Field(default_factory=dict)
    """For expert parallelism."""
    fsdp: dict[str, str] = Field(default_factory=dict)
    """For FSDP."""


class ProcessKeys(Section):
    """How the processes share the work. Without any of these keys each has the whole model and its own batches."""

    fsdp: bool = False
    """Whether accelerate shards the model (FSDP2) after each process has built it whole."""
    sp_size: int = Field(default=1, ge=1)
    """So many processes share each sequence (Ulysses sequence parallelism)."""
    cp_size: int = Field(default=1, ge=1)
    """So many such groups share each sequence: attention's keys and values travel round a ring of them."""
    sp_overlap: bool = False
    """Whether the processes of sp_size exchange queries, keys and values while the next of them are projected."""
    fsdp_size: int = Field(default=1, ge=1)
    """Over so many groups of processes transformers shards the model while it is loaded (FSDP2)."""
    tp_size: int = Field(default=1, ge=1)
    """So many processes compute each layer together (tensor parallelism)."""
    ep_size: int = Field(default=1, ge=1)
    """So many processes hold different experts (expert parallelism)."""
    parallel_plan: ParallelPlan | None = None
    """Rules that override the model's own plan of what is sharded how."""
    timeout: int = Field(default=1800, ge=1)
    """How many seconds processes wait for each other."""

    @property
    def is_sharded(self) -> bool:
        """Whether transformers shards the model while it is loaded."""
        return self.fsdp_size * self.tp_size > 1

    @property
    def ranks_per_sequence(self) -> int:
        """How many neighbouring ranks hold a part of each sequence."""
        return self.sp_size * self.cp_size

    @property
    def parts_of_sequence(self) -> int:
        """In how many parts sequences are cut, which must divide their length: a ring's ranks have two each."""
        return self.ranks_per_sequence * (2 if self.cp_size > 1 else 1)

    @property
    def ranks_per_batch(self) -> int:
        """How many neighbouring ranks train on the same batch."""
        return self.ranks_per_sequence * self.tp_size
