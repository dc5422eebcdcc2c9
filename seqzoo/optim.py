"""What an optimiser is told of a model's parameters."""

from typing import Any

from torch import nn

from .mixer import ParamRule, TokenMixer


def param_groups(model: nn.Module, *, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for a torch optimiser, by each mixer's own `param_rule`; frozen parameters are left out.

        torch.optim.AdamW(param_groups(model, lr=1e-3, weight_decay=0.1))

    Outside the mixers matrices decay, and biases, gains and other vectors do not. Each group holds its own
    lr, which the schedulers of torch scale.

    Args:
        model: any module, with mixers anywhere in it.
        lr: learning rate of what has no rule of its own; a rule scales it.
        weight_decay: of what decays; 0 for the rest.

    Returns:
        Dicts with "params", "lr" and "weight_decay", one for each rule that occurs.
    """
    rules = {parameter: ParamRule(decay=parameter.dim() >= 2) for parameter in model.parameters()}
    for module in model.modules():  # a mixer inside a mixer comes later, and has the last word
        if isinstance(module, TokenMixer):
            rules.update({p: module.param_rule(name, p) for name, p in module.named_parameters()})
    groups: dict[ParamRule, dict[str, Any]] = {}
    for parameter, rule in rules.items():
        if parameter.requires_grad:
            decay = weight_decay if rule.decay else 0.0
            fresh = {"params": [], "lr": lr * rule.lr_scale, "weight_decay": decay}
            groups.setdefault(rule, fresh)["params"].append(parameter)
    return list(groups.values())
