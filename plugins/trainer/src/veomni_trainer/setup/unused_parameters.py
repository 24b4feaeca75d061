"""Whether DDP has to look, in every step, for parameters that got no gradient."""

from __future__ import annotations

from transformers import PreTrainedModel

from veomni_core import Plan
from veomni_trainer.job.train_section import TrainSection


def may_leave_parameters_unused(model: PreTrainedModel, plan: Plan, train: TrainSection) -> bool:
    """Whether a step may leave parameters of ``model`` without a gradient.

    Experts may get no token, and text leaves the image or audio part of a model unused. All parameters of a dense
    language model are used in each step, so DDP needn't walk its graph. With gradient checkpointing DDP can't look.
    """
    if train.gradient_checkpointing:
        return False
    has_experts = any(op.op_name == "moe_experts" and op.sites for op in plan.ops)
    return has_experts or model.config.get_text_config() is not model.config
