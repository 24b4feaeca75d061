"""Logits that are computed on first use are a tensor like any other, to whoever reads them and to autograd."""

from __future__ import annotations

import copy
import io
import pickle

import numpy
import pytest
import torch
from torch.nn import functional as F

from veomni_core.errors import LogitsGoneError
from veomni_core.ops import cross_entropy_loss
from veomni_core.sites.forwards.deferred_logits import DeferredLogits, deferred_logits
from veomni_core.sites.forwards.head_call import HeadCall

ALL = slice(None)
HIDDEN, VOCABULARY, IGNORED = 8, 11, -100


class Head:
    """One call of an output projection, eager or deferred, with labels for it. ``asked`` are the kernel's options."""

    def __init__(self, deferred: bool, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(0)
        sizes = (*(shape or (2, 5)), HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,)
        self.leaves = [torch.randn(size, generator=draw).to(dtype).requires_grad_() for size in sizes]
        self.labels = torch.randint(VOCABULARY, sizes[0][:-1], generator=draw)
        self.labels.view(-1)[2] = IGNORED
        self.asked: list[dict] = []
        self.call = HeadCall(*self.leaves, self._kernel) if deferred else None
        self.logits = deferred_logits(self.call, *self.leaves) if self.call else F.linear(*self.leaves)

    def _kernel(self, *args, **options):
        self.asked.append(options)
        return cross_entropy_loss.causal(*args, **options)

    def leave_forward(self) -> None:
        """The model's forward is over."""
        if self.call:
            self.call.open = False

    def loss(self, between=lambda logits: logits, **options) -> torch.Tensor:
        """As transformers takes it: shifted, in float32."""
        logits = between(self.logits).float()[..., :-1, :].contiguous().view(-1, VOCABULARY)
        labels = self.labels[..., 1:].reshape(-1)
        labels = labels.masked_fill(labels == IGNORED, options.get("ignore_index", IGNORED))
        return F.cross_entropy(logits, labels, **options)


def both(run):
    """What ``run`` gives, and the leaves' gradients after it, with deferred and with eager logits."""
    outcomes = []
    for deferred in (True, False):
        head = Head(deferred)
        result = run(head)
        outcomes.append((result, [leaf.grad for leaf in head.leaves]))
    return outcomes


def assert_like_eager(run) -> None:
    (found, gradients), (wanted, wanted_gradients) = both(run)
    torch.testing.assert_close(found, wanted)
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted_gradient)


def backward(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    "index, waits",
    [
        (0, True),
        (..., True),
        ((ALL, slice(-1)), True),
        ((ALL, -1), True),
        ((..., ALL), True),
        ((ALL, slice(1, None), ALL), True),
        ((..., 3), False),
        ((..., slice(5)), False),
        ((0, 1, 2), False),
        ((0, 1, 2, ...), False),
        ((ALL, ALL, [1, 4]), False),
        (torch.tensor([True, False]), False),
    ],
    ids=str,
)
def test_an_index_that_leaves_the_vocabulary_whole_computes_nothing(index, waits):
    deferred, eager = Head(True), Head(False)
    found = deferred.logits[index]
    assert (isinstance(found, DeferredLogits) and found.computed is None) == waits
    torch.testing.assert_close(found + 0, eager.logits[index])


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"ignore_index": 3}], ids=str)
def test_a_plain_cross_entropy_is_the_kernel_s(options):
    assert_like_eager(lambda head: backward(head.loss(**options)))
    head = Head(True)
    head.loss(**options)
    assert len(head.asked) == 1 and head.logits.computed is None


@pytest.mark.parametrize(
    "options",
    [{"label_smoothing": 0.1}, {"weight": torch.rand(VOCABULARY)}],
    ids=["label smoothing", "class weights"],
)
def test_another_cross_entropy_is_computed_from_the_logits(options):
    assert_like_eager(lambda head: backward(head.loss(**options)))
    head = Head(True)
    head.loss(**options)
    assert not head.asked


def test_a_loss_per_token_is_computed_from_the_logits():
    assert_like_eager(lambda head: backward(head.loss(reduction="none").mean()))


@pytest.mark.parametrize(
    "between, softcap, scale",
    [
        (lambda x: x * 3.0, None, 3.0),
        (lambda x: x / 4.0, None, 0.25),
        (lambda x: torch.tanh(x / 5.0) * 5.0, 5.0, 1.0),
        (lambda x: 2.0 * torch.tanh(x), 2.0, 2.0),
    ],
    ids=["a scale", "a temperature", "a softcap", "a softcap of the scaled"],
)
def test_a_scale_and_a_softcap_are_told_to_the_kernel(between, softcap, scale):
    assert_like_eager(lambda head: backward(head.loss(between)))
    head = Head(True)
    head.loss(between)
    (asked,) = head.asked
    assert (asked["softcap"], asked["scale"] or 1.0) == (softcap, pytest.approx(scale))


@pytest.mark.parametrize(
    "between",
    [
        torch.tanh,
        lambda x: torch.tanh(x) * 2.0 * 3.0,
        lambda x: torch.tanh(x) / 2.0,
        lambda x: x + 1.0,
        lambda x: -x,
        lambda x: (x * 1.0).mul_(2.0),
    ],
    ids=["tanh alone", "a scaled softcap", "a softcap below", "a sum", "the negative", "in place"],
)
def test_other_arithmetic_computes_the_logits(between):
    assert_like_eager(lambda head: backward(head.loss(between)))


@pytest.mark.parametrize("labels", [7, 13])
def test_labels_of_another_length_are_refused_as_in_eager_code(labels):
    head = Head(True)
    with pytest.raises(ValueError, match=r"Expected input batch_size \(10\) to match target batch_size"):
        F.cross_entropy(head.logits.view(-1, VOCABULARY), torch.zeros(labels, dtype=torch.long))


READERS = {
    "==": lambda x: (x == 0).sum(),
    "isinstance": lambda x: isinstance(x, torch.Tensor) and torch.is_tensor(x),
    "1 - logits": lambda x: 1 - x,
    "logits ** 2": lambda x: x**2,
    "len": len,
    "argmax": lambda x: x.argmax(-1),
    "numpy": lambda x: numpy.asarray(x.detach()).sum().item(),
    "tolist": lambda x: x.tolist(),
    "data": lambda x: x.data + 0,
    "iteration": lambda x: [row.sum().item() for row in x],
    "torch.cat": lambda x: torch.cat([x, x]),
    "bits": lambda x: x.detach().view(torch.int32),
    "copy.copy": lambda x: copy.copy(x) + 0,
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "torch.save": lambda x: _saved(x.detach()),
    "repr": lambda x: repr(x.detach()),
    "form": lambda x: (x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_leaf, x.is_contiguous()),
    "storage": lambda x: x.untyped_storage().nbytes(),
    "empty_like": lambda x: type(torch.empty_like(x)) is torch.Tensor,
    "pytree": lambda x: torch.utils._pytree.tree_map_only(torch.Tensor, torch.mean, {"logits": x}),
    "in place": lambda x: torch.softmax(x.detach().masked_fill_(torch.arange(VOCABULARY) < 5, -1e9), -1),
}


def _saved(tensor: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_after_the_forward_they_read_as_any_tensor(read):
    def run(head: Head):
        head.loss()
        head.leave_forward()
        return read(head.logits)

    (found, _), (wanted, _) = both(run)
    if isinstance(wanted, torch.Tensor | dict | list):
        torch.testing.assert_close(found, wanted)
    else:
        assert found == wanted


def test_a_boolean_of_them_is_as_ambiguous_as_any_tensor_s():
    with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value is ambiguous"):
        bool(Head(True).logits)


def test_what_is_written_into_them_stays():
    def run(head: Head) -> torch.Tensor:
        head.leave_forward()
        head.logits[:, :, 0] = -1e9
        head.logits.div_(2.0)
        return head.logits.detach() + 0

    assert_like_eager(run)


def test_a_write_does_not_reach_the_copies_taken_before_it_and_reaches_the_views():
    def run(head: Head) -> list[torch.Tensor]:
        view, duplicate = head.logits[:, :-1], head.logits.clone()
        head.logits.mul_(3.0)
        return [(tensor + 0).detach() for tensor in (view, duplicate, head.logits)]

    assert_like_eager(run)


def test_in_no_grad_they_want_no_gradient():
    with torch.no_grad():
        head = Head(True)
        assert not head.logits.requires_grad and not head.loss().requires_grad
    torch.testing.assert_close(head.logits.numpy(), Head(False).logits.detach().numpy())


HOOKS = {
    "zeroing": lambda gradient: gradient * 0,
    "scaling as a step does": lambda gradient: gradient * 3.0,
    "clamping": lambda gradient: gradient.clamp(-1e-3, 1e-3),
    "reading": lambda gradient: print(end="" if gradient.norm() else " "),
    "keeping": lambda gradient: None,
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_hook_on_the_logits_gets_and_changes_their_gradient(hook):
    def run(head: Head) -> torch.Tensor:
        head.logits.register_hook(hook)
        return backward(head.loss(lambda logits: logits * 3.0))

    assert_like_eager(run)


def test_their_gradient_can_be_retained_and_asked_for():
    def retained(head: Head) -> torch.Tensor:
        head.logits.retain_grad()
        head.loss(lambda logits: torch.tanh(logits / 2.0) * 2.0).backward()
        return head.logits.grad

    assert_like_eager(retained)
    assert_like_eager(lambda head: torch.autograd.grad(head.loss(), head.logits)[0] + 0)


def test_another_loss_of_them_adds_its_gradient():
    def run(head: Head) -> torch.Tensor:
        loss = head.loss()
        head.leave_forward()
        return backward(loss + F.log_softmax(head.logits, -1).square().mean())

    assert_like_eager(run)


def test_two_fused_losses_add_up_without_logits():
    def run(head: Head) -> torch.Tensor:
        return backward(head.loss() + 2.0 * head.loss(reduction="sum"))

    assert_like_eager(run)
    head = Head(True)
    run(head)
    assert len(head.asked) == 2 and head.logits.computed is None


def test_backward_twice_works_where_the_graph_is_retained_and_is_refused_where_not():
    def run(head: Head) -> torch.Tensor:
        loss = head.loss()
        loss.backward(retain_graph=True)
        return backward(loss)

    assert_like_eager(run)
    loss = Head(True).loss()
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_a_second_derivative_is_refused():
    head = Head(True)
    with pytest.raises(RuntimeError, match="computes no second derivatives"):
        torch.autograd.grad(head.loss(), head.leaves[0], create_graph=True)


@pytest.mark.parametrize("position", range(3), ids=["hidden", "weight", "bias"])
def test_with_the_others_frozen_one_input_gets_its_gradient(position):
    found, wanted = (_gradient_of(position, deferred) for deferred in (True, False))
    torch.testing.assert_close(found, wanted)


def _gradient_of(position: int, deferred: bool) -> torch.Tensor:
    head = Head(False)
    leaves = [leaf.detach().requires_grad_(index == position) for index, leaf in enumerate(head.leaves)]
    call = HeadCall(*leaves, cross_entropy_loss.causal)
    logits = deferred_logits(call, *leaves) if deferred else F.linear(*leaves)
    F.cross_entropy(logits.view(-1, VOCABULARY), head.labels.view(-1)).backward()
    return leaves[position].grad


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.detach().mul_(0.9),
        lambda weight: weight.data.copy_(weight.data * 0.9),
        lambda weight: weight.untyped_storage().resize_(0),
    ],
    ids=["in place", "through .data", "freed, as FSDP2 does"],
)
def test_reading_them_after_the_weight_changed_is_refused(change):
    head = Head(True)
    head.leave_forward()
    change(head.leaves[1])
    with pytest.raises(LogitsGoneError, match=r"weight was .* since.* Read outputs.logits before that"):
        head.logits.argmax(-1)


def test_reading_them_before_keeps_them():
    head, eager = Head(True), Head(False)
    head.leave_forward()
    head.logits.argmax(-1)
    head.leaves[1].detach().zero_()
    torch.testing.assert_close(head.logits + 0, eager.logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_logits_loss_and_gradients_are_eager_code_s(dtype):
    outcomes = []
    for deferred in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            head = Head(deferred, dtype=dtype)
            loss = head.loss()
            head.leave_forward()
        loss.backward()
        outcomes.append([loss.detach(), (head.logits + 0).detach(), *(leaf.grad for leaf in head.leaves)])
    for found, wanted in zip(*outcomes, strict=True):
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(outcomes[0][1], outcomes[1][1])
