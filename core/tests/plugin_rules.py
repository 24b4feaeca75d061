"""Site rules as a plugin might bring them, right ones and wrong ones."""

from __future__ import annotations

from dataclasses import replace

from counting_kernels import counting_registry
from veomni_core import SiteRule
from veomni_core.changes.change import ForwardChange
from veomni_core.discovery.registry import PluginRecord, Registry, build_registry
from veomni_core.sites.site import Site


class Rule:
    """Finds the modules whose path ends in ``ends``, and gives them ``forward``."""

    op_name, variant, ends = "rms_norm", "standard", "norm"

    def find(self, model, rule):
        for path, _ in model.named_modules():
            if path.endswith(self.ends):
                yield Site(self.op_name, path, rule, self.variant, "the plugin says so")

    def install(self, model, site, kernel, spec):
        yield ForwardChange(model.get_submodule(site.path), self.forward(kernel, model.get_submodule(site.path)))

    def forward(self, kernel, module):
        return lambda self, hidden_states: kernel(hidden_states, self.weight, 1e-6)


class SameNorms(Rule):
    pass


class WrongNorms(Rule):
    ends = "input_layernorm"

    def forward(self, kernel, module):
        return lambda self, hidden_states: 2 * kernel(hidden_states, self.weight, 1e-6)


class HoldingNorms(Rule):
    def forward(self, kernel, module):
        return lambda self, hidden_states: kernel(hidden_states, module.weight, 1e-6)


class GuardedNorms(Rule):
    """Its proof would rest on ``eps`` and on the child ``act``."""

    def install(self, model, site, kernel, spec):
        module = model.get_submodule(site.path)
        yield ForwardChange(module, self.forward(kernel, module), guarded=("eps", "act"))


class EagerNorms(Rule):
    """For a rule with ``installs_eager``."""

    def install(self, model, site, kernel, spec):
        assert kernel is not None and spec is not None
        return super().install(model, site, kernel, spec)

    def install_eager(self, model, site):
        yield ForwardChange(model.get_submodule(site.path), lambda self, hidden_states: "eager code")


class Layers(Rule):
    """Replaces whole decoder layers by a forward that calls nothing within them."""

    op_name, ends = "swiglu_mlp", "layers.0"

    def forward(self, kernel, module):
        return lambda self, hidden_states, **kwargs: kernel(hidden_states, hidden_states)


class CallingLayers(Layers):
    def install(self, model, site, kernel, spec):
        within = ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp")
        yield ForwardChange(model.get_submodule(site.path), self.forward(kernel, None), calls=within)


class ReadingLayers(Layers):
    """Takes the norms' weights into a kernel of its own; calls one of the norms."""

    def install(self, model, site, kernel, spec):
        def forward(self, hidden_states, **kwargs):
            weights = self.input_layernorm.weight, self.post_attention_layernorm.weight
            return self.post_attention_layernorm(hidden_states * weights[0] * weights[1])

        yield ForwardChange(model.get_submodule(site.path), forward, calls=("self_attn", "mlp"))


class MlpsAsNorms(Rule):
    """Claims the modules that the core's rule for gated MLPs has, for another op."""

    ends = "mlp"

    def forward(self, kernel, module):
        return lambda self, x: kernel(x, None, 1e-6)


def registry_with(*rules: type, order: int = 50) -> Registry:
    """The core's rules and kernels that count their calls, and ``rules`` as a plugin brings them."""
    counting = counting_registry("one")
    specs = tuple(SiteRule(rule.__name__, f"{__name__}:{rule.__name__}", order) for rule in rules)
    acme = PluginRecord("acme", "acme", "1", __name__, site_rules=specs)
    # With its ops, which vouch for its kernels: bind would call a stranger's once.
    return replace(build_registry([*counting.plugins, acme], {}), ops=counting.ops)
