"""Which policies a loaded engine runs under: made from its options, costs and calibration."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch

from lowtide.buddies import BuddyTwins
from lowtide.core import Costs, Curve
from lowtide.engine.opening.config import MAX_PASS_ROWS
from lowtide.engine.opening.model import OpenModel
from lowtide.engine.opening.model_calibration import find_calibration, no_calibration
from lowtide.engine.opening.option_checks import check_without_experts
from lowtide.engine.planning.plan import workspace_bytes
from lowtide.engine.planning.registering import planner_of
from lowtide.engine.running.engine import Engine
from lowtide.errors import PlanError
from lowtide.experts.device_tier import DeviceTier
from lowtide.experts.early_gate import EarlyGate, Route
from lowtide.experts.host_tier import HostTier
from lowtide.experts.none import NoExperts
from lowtide.experts.runtime import ExpertRuntime
from lowtide.experts.transfer import ticket_result
from lowtide.hardware.core_speed import measure_device_s
from lowtide.kernels.choice import compiled_buddies
from lowtide.layers.router import Router, SigmoidRouter
from lowtide.plan import MemoryPlan
from lowtide.policies.decision import Policies
from lowtide.policies.online_tau import TauChange
from lowtide.policies.prefetch import Gate
from lowtide.policies.presets import TRIED, choose_preset, make_policies, parse_options, recipe
from lowtide.policies.recipe import Setting
from lowtide.policies.tau import FollowDrift, SolvedTau, calibrated_tau
from lowtide.policies.trial import PolicyTrial
from lowtide.replay.calibration import Calibration

_log = logging.getLogger(__name__)


def adopt_policy(engine: Engine, policy: str, policy_options: Mapping[str, str]) -> Engine:
    """The same engine under another policy, which starts from its own first residents.

    Between passes only; `engine` itself is to be forgotten. Raises UsageError for a policy or an
    option that there is not, PlanError for a policy that needs more than the plan has: `engine`
    then goes on as before.
    """
    options = replace(engine.opened.options, policy=policy, policy_options=policy_options)
    opened, plan, experts = replace(engine.opened, options=options), engine.plan, engine.experts
    if isinstance(experts, NoExperts):
        check_without_experts(opened.config, options)
        return engine
    _check_workspace(opened, plan)
    preset, reason = choose_preset(
        policy, everything_fits=plan.everything_fits, has_device=plan.gpu is not None
    )
    plan = replace(plan, policy=preset, reason=reason)
    return with_trial(_adopted(engine, opened, plan))


def with_trial(engine: Engine) -> Engine:
    """The same engine; under `auto` beside a device with a trial of what is faster there."""
    experts, plan, trial = engine.experts, engine.plan, None
    if not (isinstance(experts, NoExperts) or experts.device is None or plan.everything_fits):
        can_fetch = experts.device.costs.num_staging > 0
        if engine.opened.options.policy == "auto" and can_fetch:
            trial = PolicyTrial(*TRIED)
    return replace(engine, trial=trial)


def follow_trial(engine: Engine, num_rows: int, seconds: float) -> Engine:
    """The engine for the next pass, after one that took `seconds`."""
    trial = engine.trial
    if trial is None:
        return engine
    was_decided, preset = trial.verdict, trial.note_pass(num_rows, seconds)
    plan = engine.plan
    if trial.verdict is not None and was_decided is None:
        plan = replace(plan, reason=str(trial.verdict))
        _log.info("auto: %s.", trial.verdict)
    if preset == plan.policy:
        return engine if plan is engine.plan else replace(engine, plan=plan)
    return _adopted(engine, engine.opened, replace(plan, policy=preset))


def _adopted(engine: Engine, opened: OpenModel, plan: MemoryPlan) -> Engine:
    """The engine under the plan's policy, made from the options of `opened`."""
    experts = engine.experts
    if isinstance(experts, NoExperts):
        return engine
    calibration, progress = find_calibration(opened), opened.options.report
    cores_per_expert = engine.executor.cores_per_expert
    policies = make_engine_policies(
        opened, plan, calibration, experts.host, experts.device, cores_per_expert
    )
    if engine.elastic is not None:
        engine.elastic.restore()
    experts.adopt(policies, progress)
    planner = planner_of(opened)
    if engine.pass_plans is not None and planner is not None:
        engine.pass_plans.planner = planner
    set_early_gate(opened, experts, engine.model.routers, calibration)
    return replace(engine, opened=opened, plan=plan)


def _check_workspace(opened: OpenModel, plan: MemoryPlan) -> None:
    """Raises PlanError for a policy that wants more of a pass than was planned for."""
    needed_bytes, planned_bytes = workspace_bytes(opened)[0], plan.fast_tier.workspace_bytes
    if needed_bytes > planned_bytes:
        raise PlanError(
            f"Policy {opened.options.policy!r} needs a workspace of {needed_bytes} bytes for the "
            f"routing that it asks for, and {planned_bytes} are planned; open the model with it."
        )


def _setting(
    opened: OpenModel, plan: MemoryPlan, calibration: Calibration | None, costs: Costs
) -> Setting:
    """What the preset's policies are made from. Raises UsageError for `tau=paper` without a
    calibration.
    """
    options = parse_options(opened.options.policy, opened.options.policy_options)
    if options.get("tau") is SolvedTau.PAPER:
        options["tau"] = _paper_tau(plan, calibration, costs)
    setting = Setting(
        plan.residents_per_layer,
        opened.config.moe.num_experts,
        costs,
        options=options,
        on_tau_change=_log_tau,
        seed=opened.options.seed or 0,
        twins=_buddy_twins(opened),
    )
    if calibration is None:
        return setting
    return replace(
        setting,
        frequency=calibration.frequency,
        following=calibration.following,
        hits=calibration.trace.hits(),
        buddies=calibration.buddies,
    )


def _buddy_twins(opened: OpenModel) -> BuddyTwins | None:
    """Compiled where kernels may be and the policy substitutes; None: the plain ones."""
    if opened.options.kernels == "reference" or not opened.changes_words:
        return None
    return compiled_buddies()


def make_engine_policies(
    opened: OpenModel,
    plan: MemoryPlan,
    calibration: Calibration | None,
    host: HostTier,
    device: DeviceTier | None,
    cores_per_expert: int,
) -> Policies:
    """The plan's preset at work on these tiers. Raises UsageError for `tau=paper` without a
    calibration, StorageError when an expert cannot be read.
    """
    if device is None:
        costs = _disk_costs(opened, host, plan.policy, cores_per_expert)
        setting = _setting(opened, plan, calibration, costs)
        unused = recipe(plan.policy).unused_without_device
        if unused and opened.options.policy == plan.policy and not plan.everything_fits:
            _log.warning(
                "Without a device %s is its placement alone: its %s %s not used.",
                *(plan.policy, " and its ".join(unused), "are" if len(unused) > 1 else "is"),
            )
        return recipe(plan.policy).policies_without_device(setting)
    setting = _setting(opened, plan, calibration, device.costs)
    return make_policies(plan.policy, setting, everything_fits=plan.everything_fits)


def set_early_gate(
    opened: OpenModel,
    experts: ExpertRuntime | NoExperts,
    routers: Sequence[Router],
    calibration: Calibration | None,
) -> None:
    """Gives a device what its prefetch policy predicts by; without a calibration the features are
    taken as they are.
    """
    if experts.device is None:
        return
    residual, gate = None, experts.policies.prefetch.gate
    if gate is Gate.RESIDUAL and calibration is not None:
        torch_device = experts.device.device.torch_device
        residual = torch.tensor(calibration.residual, dtype=opened.dtype, device=torch_device)
    routes = [_route(router) for router in routers]
    experts.device.early_gate = EarlyGate(gate, routes, residual, opened.config.moe.num_experts)


def _route(router: Router) -> Route:
    """A router by itself, for a guess: without the windows that tokens of a block share."""
    if isinstance(router, SigmoidRouter) and router.capacity:
        router = replace(router, capacity=0)
    return lambda x: router.route(x, ()).experts


def _log_tau(change: TauChange) -> None:
    _log.info(
        "tau %d -> %d after %d steps, of which the last would have taken %.0f%% less time.",
        change.old,
        change.new,
        change.num_steps,
        100 * change.saved,
    )


def _paper_tau(plan: MemoryPlan, calibration: Calibration | None, costs: Costs) -> int:
    if calibration is None:
        raise no_calibration()
    residents = plan.residents_per_layer
    budget = max(1, round(sum(residents) / len(residents)))
    blocks = calibration.trace.blocks()
    return calibrated_tau(blocks, budget, costs.fetch_s, costs.host_s.at(1))


def _disk_costs(opened: OpenModel, host: HostTier, preset: str, cores_per_expert: int) -> Costs:
    """What an absent expert costs where it is always read: measured on the first experts.

    For policies that do not ask nothing is measured and every time is 0.
    """
    slot_bytes, options = opened.slot_layout.num_bytes, opened.options
    tau = parse_options(options.policy, options.policy_options).get("tau")
    if not (recipe(preset).weighs_moves or isinstance(tau, FollowDrift | SolvedTau)):
        return Costs.unknown(slot_bytes)
    host.pause()  # reads that were begun for a coming layer have slots
    if not host.ledger.num_free:
        host.keep(0, np.empty(0, np.int64))  # another policy's, who may want them read again
    read_s = _read_s(host, min(8, host.ledger.num_experts, host.ledger.num_free))
    shape, kernels = opened.config.moe_shape, opened.kernels
    compute_s = measure_device_s(opened.slot_layout, shape, kernels, cores_per_expert)
    absent_s = Curve([(n, max(read_s, compute_s.at(n))) for n in (1, MAX_PASS_ROWS)])
    return Costs(slot_bytes, read_s, absent_s, compute_s, compute_s, 0.0)


def _read_s(host: HostTier, num_probes: int) -> float:
    """Seconds per expert, of so many read at once."""
    slots = [host.ledger.take() for _ in range(num_probes)]
    start_s = perf_counter()
    tickets = [host.transfer.start(0, expert, slot) for expert, slot in enumerate(slots)]
    try:
        for ticket in tickets:
            ticket_result(ticket)
        return (perf_counter() - start_s) / num_probes
    finally:
        for slot, ticket in zip(slots, tickets, strict=True):
            host.set_aside(slot, ticket)  # free once its read has ended, however that was
        host.settle()
