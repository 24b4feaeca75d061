"""transformers' ``Trainer``, extended to report loss, time and memory of every single step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch import Tensor, nn
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from veomni_core.errors import ConfigError
from veomni_trainer.data.batches import learned_labels
from veomni_trainer.data.corpus import Corpus
from veomni_trainer.data.method_inputs import MethodInputs
from veomni_trainer.data.orders import SharedBatches, validation_batches
from veomni_trainer.data.streaming import Stream
from veomni_trainer.job.train_section import TrainSection
from veomni_trainer.loop.corrected_trainer import CorrectedTrainer, weight_of_aux_loss
from veomni_trainer.loop.early_ends import BadSteps
from veomni_trainer.loop.expert_loads import ExpertLoads
from veomni_trainer.loop.measures import StepClock, Throughput, peak_memory, reset_peak, wait_for
from veomni_trainer.loop.optimizers import divide, optimizer_for
from veomni_trainer.loop.step_graphs import Results, graphs_on
from veomni_trainer.output.metrics import Row
from veomni_transformers.towers.host_metadata import HostMetadata

_LEARNED = "num_items_in_batch"  # the labels that a step learns


class JobTrainer(CorrectedTrainer):
    """A ``Trainer`` that calls ``on_row`` in the first process with a row of metrics for every logged step.

    A row's loss is that of its own step, averaged over processes. ``Trainer`` logs the mean since the previous row
    instead; then an interrupted and resumed run would write other rows than an uninterrupted one.

    Attributes:
        clock: measures the steps.
        bad_steps: finds those that are not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        corpus: Corpus,
        on_row: Callable[[Row], None],
        callbacks: list[TrainerCallback],
        train: TrainSection,
        loads: ExpertLoads | None = None,
        norms: Collection[nn.Module] = (),
        throughput: Throughput | None = None,
        inputs: MethodInputs | None = None,
    ) -> None:
        self._throughput, self._method_inputs = throughput, inputs
        self.clock, self._loads, self._corpus, self._norms = StepClock(), loads, corpus, norms
        self.bad_steps = BadSteps(train, self._loss_scale)
        super().__init__(
            train,
            model=model,
            args=args,
            # The last one reads the other callbacks' decisions, and bad_steps those of all before it.
            callbacks=[*callbacks, self.bad_steps, _StepCallback(self)],
            **self.inputs_of(model, corpus, train),
        )
        self.optimizer_cls_and_kwargs = optimizer_for(train, model)
        self.remove_callback(PrinterCallback)
        self._on_row = on_row
        graphs = partial(graphs_on, args.device, model, train.gradient_accumulation > 1, train.gradient_checkpointing)
        self._graphs = graphs() if train.cuda_graphs else None
        self.start_step()

    def inputs_of(self, model: nn.Module, corpus: Corpus, train: TrainSection) -> dict[str, Any]:
        """What the base class is given of the data."""
        training = corpus.training
        if isinstance(training, Stream):
            training = training.in_batches(train.batch_size, train.ranks_per_batch)
        metadata = HostMetadata(model) if corpus.processor is not None else None
        return {
            "data_collator": corpus.batcher(multiple=train.parts_of_sequence, metadata=metadata),
            "train_dataset": training,
        }

    def curves(self) -> Row:
        """What the method has measured since the last row, by the names of its curves."""
        return {}

    def look_at(self, outputs: Any, inputs: dict[str, Any]) -> None:
        """Take what the model computed of a batch that is no validation's; overridden by methods that measure it."""

    def start_step(self) -> None:
        """Clear the losses of the previous step."""
        self._aux_losses: list[Tensor] = []
        self._aux_loss: Tensor | None = None  # the last forward's
        self.bad_steps.start_step()
        if self._loads:
            self._loads.start_step()

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            trained: Any = self.model if model is None else model
            given = () if model is None else (model,)  # the first versions that are admitted take none
            divide(super().create_optimizer(*given), trained, self._train.parameter_groups)
        assert self.optimizer is not None
        return self.optimizer

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Without the weights of norms that were found by what they compute: ``Trainer`` goes by their names."""
        norms = {id(parameter) for norm in self._norms for parameter in norm.parameters()}
        undecayed = {name for name, parameter in model.named_parameters() if id(parameter) in norms}
        return [name for name in super().get_decay_parameter_names(model) if name not in undecayed]

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        shared, seed = self._train.ranks_per_batch, self.args.data_seed or 0
        order: Any
        if self._corpus.is_mixed:
            order = self._corpus.order(seed)
        elif shared > 1:
            order = SeedableRandomSampler(self.train_dataset, data_seed=seed)
        else:
            return super()._get_train_sampler(*args, **kwargs)
        return SharedBatches(order, self._train_batch_size, shared) if shared > 1 else order

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """The mean loss over the learned tokens of the validation sequences; each counts once, in whichever batch."""
        model: Any = self.model
        model.eval()
        totals = {key: self._total_loss(model, sequences) for key, sequences in self._corpus.validation.items()}
        losses, tokens = (torch.stack(each) for each in zip(*totals.values(), strict=True))
        metrics = {"eval_loss": float(losses.sum() / tokens.sum())}
        if len(totals) > 1:
            metrics |= {f"eval_loss of {key}": float(loss / count) for key, (loss, count) in totals.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _total_loss(self, model: nn.Module, sequences: Any) -> Tensor:
        """The sum of the losses of ``sequences`` on all ranks, and how many tokens are learned in them: ``[2]``."""
        # The ranks that share a batch evaluate the same sequences.
        shared = self._train.ranks_per_batch
        groups, group = self.args.world_size // shared, self.args.process_index // shared
        total = torch.zeros(2, device=self.args.device)
        for batch in validation_batches(len(sequences), self.args.eval_batch_size, groups, group):
            inputs = self._prepare_inputs(self.data_collator([sequences[index] for index in batch.indices]))
            tokens = learned_labels(inputs["labels"])
            with torch.no_grad(), self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs, num_items_in_batch=tokens.clamp_min(1))
            if batch.weight and tokens:
                total += torch.stack([loss * tokens, tokens])
        summed: Tensor = self.accelerator.reduce(total, "sum")
        return summed

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        self.count_tokens(inputs)
        if self._graphs is None:
            found = self._forward_and_backward(model, inputs, num_items_in_batch)
        else:
            if num_items_in_batch is None and self._train.gradient_accumulation > 1:
                raise ConfigError(
                    f"train.cuda_graphs: {type(self.model).__name__} computes each micro-batch's mean loss by itself, "
                    "and an epoch's last step may have fewer of them, which a graph can't know; write "
                    "gradient_accumulation: 1, or cuda_graphs: false"
                )
            given = self._prepare_inputs({**inputs, _LEARNED: num_items_in_batch})
            found = self._graphs(partial(self._captured_step, model), given)
        loss = found["loss"]
        self.bad_steps.look_at_loss(loss)
        if "aux_loss" in found:
            self._aux_losses.append(found["aux_loss"])
        return loss

    def _captured_step(self, model: nn.Module, given: dict[str, Any]) -> Results:
        """A micro-step of which ``given`` is all that differs from step to step."""
        return self._forward_and_backward(model, given, given.pop(_LEARNED))

    def _forward_and_backward(self, model: nn.Module, inputs: Any, learned: Tensor | int | None) -> Results:
        """What ``Trainer`` does in a micro-step, and the losses that it measures. TRL's inputs may be of any kind."""
        self._aux_loss = None
        loss = super().training_step(model, inputs, learned)
        return {"loss": loss} if self._aux_loss is None else {"loss": loss, "aux_loss": self._aux_loss}

    def count_tokens(self, inputs: dict[str, Any]) -> None:
        """Count the tokens of a micro-step, on all ranks."""
        shape = inputs["input_ids"].shape
        self._count(shape.numel() * self.args.world_size // self._train.ranks_per_batch, shape[-1])

    def _count(self, tokens: int, length: int) -> None:
        self.clock.count(tokens)
        if self._throughput:
            self._throughput.count(tokens, length)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)
        self.bad_steps.look_at_norm(norm)
        return norm

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        with self._loads.counting() if self._loads and model.training and self._logs_step() else nullcontext():
            loss, outputs = super().compute_loss(
                model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
            )
        if model.training:
            self.look_at(outputs, inputs)
        if model.training and (aux_loss := getattr(outputs, "aux_loss", None)) is not None:
            self._aux_loss = aux_loss.detach()
            if num_items_in_batch is not None and self.model_accepts_loss_kwargs:
                # A mean of its own in each micro-step, whose tokens' losses are divided by the step's tokens already.
                share = 1 / self.current_gradient_accumulation_steps
                loss = loss + (share - 1) * weight_of_aux_loss(loss, aux_loss, self.model) * aux_loss
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Called by ``Trainer`` in every process with values to log; turns them into rows."""
        step = self.state.global_step
        if "eval_loss" in logs:
            rows = {key.replace("eval_loss", "validation_loss"): value for key, value in logs.items()}
            self._hand_on({"step": step, **rows})
        if "loss" not in logs:
            return
        row: Row = {"step": step, "loss": self._mean(torch.stack(self.bad_steps.losses).sum())}
        if self._aux_losses:
            row["aux_loss"] = self._mean(torch.stack(self._aux_losses).mean())
        row |= {key: logs[key] for key in ("grad_norm", "learning_rate") if key in logs}
        row |= self.curves()
        if self.learned_tokens is not None:
            row["learned_tokens"] = int(self.learned_tokens)
        row |= {"bad": self.bad_steps.problem} if self.bad_steps.problem else {}
        row |= self._loads.measure(self.accelerator.gather) if self._loads else {}
        seconds = self.clock.seconds
        row |= self.clock.read() | {"peak_memory_bytes": peak_memory(self.args.device)}
        if self.args.world_size > 1:
            row["tokens_per_second_each"] = row["tokens_per_second"] / self.args.world_size
        row |= self._throughput.read(seconds) if self._throughput else {}
        self._hand_on(row)
        self.clock.forget_pause()  # a listener may have drawn the report

    def _logs_step(self) -> bool:
        """Whether the step that runs will be logged; an interrupt that makes it the last one is not known yet."""
        step = self.state.global_step + 1
        return step % self._train.log_every == 0 or step >= self.state.max_steps

    def _hand_on(self, row: Row) -> None:
        if self.is_world_process_zero():
            self._on_row(row)

    def _loss_scale(self) -> float | None:
        scaler = self.accelerator.scaler
        return scaler.get_scale() if scaler is not None else None

    def _mean(self, value: Tensor) -> float:
        return float(self.accelerator.reduce(value.float(), "mean"))


class _StepCallback(TrainerCallback):
    """Tells the trainer when each step begins and ends."""

    def __init__(self, trainer: JobTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        reset_peak(args.device)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.clock.start()
        self._trainer.start_step()

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **__: Any) -> None:
        if control.should_training_stop:
            control.should_log = True  # the last step is logged, whatever log_every is
        if control.should_save or control.should_evaluate:
            wait_for(args.device)  # so that the pause doesn't include work of this step that is still running
        self._trainer.clock.end_step()

    def on_save(self, *_: Any, **__: Any) -> None:
        self._trainer.clock.forget_pause()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._trainer.clock.forget_pause()
