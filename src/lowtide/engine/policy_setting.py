"""Which policies a loaded engine runs under: made from its options, costs and calibration."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter

import torch

from lowtide.core import Costs, Curve, MemoryPlan
from lowtide.devices.emulated import measure_device_s
from lowtide.engine.engine import Engine
from lowtide.engine.opening import MAX_PASS_ROWS, OpenModel, find_calibration, no_calibration
from lowtide.experts.early_gate import EarlyGate, Route
from lowtide.experts.hybrid import HybridRuntime
from lowtide.experts.runtime import ExpertRuntime
from lowtide.experts.transfer import Transfer, ticket_result
from lowtide.layers.router import Router, SigmoidRouter
from lowtide.policies.decision import Policies
from lowtide.policies.prefetch import Gate
from lowtide.policies.presets import (
    candidates,
    choose_preset,
    make_policies,
    parse_options,
    recipe,
)
from lowtide.policies.recipe import Setting
from lowtide.policies.tau import (
    MAX_ONLINE_TAU,
    FollowDrift,
    SolvedTau,
    TauChange,
    calibrated_tau,
)
from lowtide.reading.dense_weights import Progress, no_progress
from lowtide.replay.calibration import Calibration
from lowtide.replay.simulator import compare, fastest_tau, measured_accuracy
from lowtide.replay.trace import Trace

_log = logging.getLogger(__name__)


def adopt_policy(engine: Engine, policy: str, policy_options: Mapping[str, str]) -> Engine:
    """The same engine under another policy, which starts from its own first residents.

    Between passes only; `engine` itself is to be forgotten. Raises UsageError for a policy or an
    option that there is not, PlanError for a policy that needs more than the plan has: `engine`
    then goes on as before.
    """
    options = replace(engine.opened.options, policy=policy, policy_options=policy_options)
    opened, plan, experts = replace(engine.opened, options=options), engine.plan, engine.experts
    fits = plan.fast_tier.num_slots == plan.num_experts
    preset, reason = choose_preset(
        policy,
        everything_fits=fits,
        has_device=plan.gpu is not None,
        is_diffusion=opened.config.is_diffusion,
    )
    plan = replace(plan, policy=preset, reason=reason)
    calibration, progress = find_calibration(opened), options.progress or no_progress
    if isinstance(experts, HybridRuntime):
        setting = make_setting(opened, plan, calibration, experts.costs)
        experts.adopt(make_policies(preset, setting, everything_fits=fits), progress)
        experts.early_gate = make_early_gate(opened, experts, engine.model.routers, calibration)
    else:
        experts.evict_all()
        cores_per_expert = engine.executor.cores_per_expert
        policies = policies_without_device(
            opened, plan, calibration, experts.transfer, cores_per_expert
        )
        experts.adopt(policies)
        preload(experts, policies, plan, progress)
    return replace(engine, opened=opened, plan=plan)


def choose_by_simulation(
    engine: Engine, experts: HybridRuntime, calibration: Calibration | None
) -> Engine:
    """The preset of most simulated tokens per second, on the calibration's routing and the costs
    measured here; as it is where everything fits or nothing was calibrated."""
    plan, opened = engine.plan, engine.opened
    if calibration is None or plan.fast_tier.num_slots == plan.num_experts:
        return engine
    trace = _beginning(calibration, plan)
    setting = make_setting(opened, plan, calibration, experts.costs)
    names = candidates(can_fetch=experts.costs.num_staging > 0)
    reports = compare(trace, names, setting, gate_accuracy=measured_accuracy(calibration))
    best, second = sorted(reports, key=lambda report: -report.tokens_per_s)[:2]
    reason = (
        f"simulated on the calibration's routing and this machine's costs: "
        f"{best.tokens_per_s:.3g} tokens/s in the expert layers, {second.preset} "
        f"{second.tokens_per_s:.3g}; the {best.binds} binds"
    )
    if best.preset != plan.policy:
        engine = adopt_policy(engine, best.preset, {})
    return replace(engine, plan=replace(plan, policy=best.preset, reason=reason))


def make_setting(
    opened: OpenModel, plan: MemoryPlan, calibration: Calibration | None, costs: Costs
) -> Setting:
    """What the preset's policies are made from. Raises UsageError for `tau=paper` without a
    calibration."""
    options = parse_options(opened.options.policy, opened.options.policy_options)
    if options.get("tau") is SolvedTau.PAPER:
        options["tau"] = _paper_tau(plan, calibration, costs)
    setting = Setting(
        plan.residents_per_layer,
        opened.config.num_experts,
        costs,
        options=options,
        on_tau_change=_log_tau,
        seed=opened.options.seed or 0,
    )
    if calibration is None:
        return setting
    setting = replace(
        setting,
        frequency=calibration.frequency,
        following=calibration.following,
        hits=calibration.trace.hits(),
    )
    if isinstance(options.get("tau"), FollowDrift):
        trace = _beginning(calibration, plan)
        tau = fastest_tau(trace, plan.policy, setting, MAX_ONLINE_TAU)
        return setting.having(tau=FollowDrift(tau))
    return setting


def policies_without_device(
    opened: OpenModel,
    plan: MemoryPlan,
    calibration: Calibration | None,
    transfer: Transfer,
    cores_per_expert: int,
) -> Policies:
    """The policy's, where there is no device; its slots are free, to be read into."""
    made, options = recipe(plan.policy), opened.options
    parsed = parse_options(options.policy, options.policy_options)
    asks_costs = made.weighs_moves or isinstance(parsed.get("tau"), FollowDrift | SolvedTau)
    num_probes = min(8, opened.config.num_experts, plan.host.num_slots) if asks_costs else 0
    costs = _disk_costs(opened, transfer, num_probes, cores_per_expert)
    return made.policies_without_device(make_setting(opened, plan, calibration, costs))


def make_early_gate(
    opened: OpenModel,
    experts: HybridRuntime,
    routers: Sequence[Router],
    calibration: Calibration | None,
) -> EarlyGate:
    """Without a calibration the features are taken as they are."""
    residual, gate, device = None, experts.gate, experts.device.torch_device
    if gate is Gate.RESIDUAL and calibration is not None:
        residual = torch.tensor(calibration.residual, dtype=opened.dtype, device=device)
    routes = [_route(router) for router in routers]
    return EarlyGate(gate, routes, residual, opened.config.num_experts)


def preload(
    experts: ExpertRuntime, policies: Policies, plan: MemoryPlan, progress: Progress
) -> None:
    """Makes the policy's initial residents resident, layer by layer."""
    initial = [policies.placement.initial(layer) for layer in range(len(plan.residents_per_layer))]
    total_bytes = sum(map(len, initial)) * plan.host.slot_bytes
    done_bytes = 0
    for layer, residents in enumerate(initial):
        experts.preload(layer, residents)
        done_bytes += len(residents) * plan.host.slot_bytes
        progress("loading experts", done_bytes, total_bytes)


def _beginning(calibration: Calibration, plan: MemoryPlan) -> Trace:
    """As much of the routing as replays in a second or so, under some ten policies: a layer takes
    about 0.1 ms under each."""
    return calibration.trace.beginning(max(32, 2000 // len(plan.residents_per_layer)))


def _route(router: Router) -> Route:
    """A router by itself, for a guess: without the windows that tokens of a block share."""
    if isinstance(router, SigmoidRouter) and router.capacity:
        router = replace(router, capacity=0)
    return lambda x, workspace: router.route(x, (), workspace).experts


def _log_tau(change: TauChange) -> None:
    _log.info(
        "tau %d -> %d after %d steps: %.0f%% of the best residents change per step.",
        change.old,
        change.new,
        change.num_steps,
        100 * change.drift,
    )


def _paper_tau(plan: MemoryPlan, calibration: Calibration | None, costs: Costs) -> int:
    if calibration is None:
        raise no_calibration()
    residents = plan.residents_per_layer
    budget = max(1, round(sum(residents) / len(residents)))
    blocks = calibration.trace.blocks()
    return calibrated_tau(blocks, budget, costs.fetch_s, costs.host_s.at(1))


def _disk_costs(
    opened: OpenModel, transfer: Transfer, num_probes: int, cores_per_expert: int
) -> Costs:
    """What an absent expert costs where it is always read: measured on the first experts.

    Without probes nothing is measured and every time is 0, for policies that do not ask.
    """
    slot_bytes = opened.slot_layout.num_bytes
    if not num_probes:
        return Costs.unknown(slot_bytes)
    start = perf_counter()
    for ticket in [transfer.start(0, expert, expert) for expert in range(num_probes)]:
        ticket_result(ticket)
    read_s = (perf_counter() - start) / num_probes
    shape, products = opened.config.moe_shape, opened.products
    compute_s = measure_device_s(opened.slot_layout, shape, products, cores_per_expert)
    absent_s = Curve([(n, max(read_s, compute_s.at(n))) for n in (1, MAX_PASS_ROWS)])
    return Costs(slot_bytes, read_s, absent_s, compute_s, compute_s, 0.0)
