"""Makes the policies of a loaded engine from its options, costs and calibration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from lowtide.buddies import BuddyTwins
from lowtide.core import Costs, Curve, MoEShape
from lowtide.engine.opening.config import MAX_PASS_ROWS
from lowtide.engine.opening.facts import RunOptions
from lowtide.engine.opening.model_calibration import find_calibration, no_calibration
from lowtide.engine.opening.option_checks import check_without_experts
from lowtide.engine.planning.planner import PassWants, Planner
from lowtide.engine.running.engine import Engine
from lowtide.errors import PlanError, UsageError
from lowtide.experts.device_tier import DeviceTier
from lowtide.experts.early_gate import EarlyGate, Route
from lowtide.experts.host_tier import HostTier
from lowtide.experts.layout import SlotLayout
from lowtide.experts.no_experts import NoExperts
from lowtide.experts.runtime import ExpertRuntime
from lowtide.experts.transfer import ticket_result
from lowtide.hardware.core_speed import measure_device_s
from lowtide.kernels.choice import compiled_buddies
from lowtide.kernels.reference import Kernels
from lowtide.layers.router import Router, SigmoidRouter
from lowtide.plan import MemoryPlan
from lowtide.policies.buddymoe import PARTITIONS
from lowtide.policies.catalogue import TAU
from lowtide.policies.decision import Policies
from lowtide.policies.online_tau import TauChange
from lowtide.policies.prefetch import Gate
from lowtide.policies.presets import (
    TRIED,
    choose_preset,
    make_policies,
    name_of,
    options_of,
    parse_options,
    recipe,
    sizes_of,
)
from lowtide.policies.recipe import PolicyInputs, Recipe
from lowtide.policies.tau import FollowDrift, SolvedTau, calibrated_tau
from lowtide.policies.trial import PolicyTrial
from lowtide.replay.calibration import Calibration

_log = logging.getLogger(__name__)


def adopt_policy(engine: Engine, policy: str | Recipe, policy_options: Mapping[str, str]) -> Engine:
    """Return the engine under another policy, which starts with its own first residents.

    Call between passes only; `engine` must not be used afterwards. Raises UsageError for an unknown
    policy or option, PlanError if the policy needs more than the plan has; `engine` then stays
    valid.
    """
    policy = name_of(policy)
    options, plan, experts = (
        engine.options.with_policy(policy, policy_options),
        engine.plan,
        engine.experts,
    )
    if isinstance(experts, NoExperts):
        check_without_experts(engine.model.config, options.asked)
        return engine
    planner = engine.planner.wanting(PassWants.of(policy, policy_options))
    _check_workspace(planner, plan, policy)
    missing_bytes = 0 if plan.everything_fits else plan.full_bytes - plan.budget_bytes
    preset, reason = choose_preset(policy, missing_bytes, has_device=plan.gpu is not None)
    plan = replace(plan, policy=preset, reason=reason)
    return with_trial(_adopted(replace(engine, options=options, planner=planner), plan))


def with_trial(engine: Engine) -> Engine:
    """Return the engine; with `auto` beside a device it tries which policy is faster."""
    experts, plan, trial = engine.experts, engine.plan, None
    if not (isinstance(experts, NoExperts) or experts.device is None or plan.everything_fits):
        can_fetch = experts.device.costs.num_staging > 0
        if engine.options.asked.policy == "auto" and can_fetch:
            trial = PolicyTrial(*TRIED)
    return replace(engine, trial=trial)


def follow_trial(engine: Engine, num_rows: int, seconds: float) -> Engine:
    """Return the engine for the next pass, after a pass of `num_rows` rows that took `seconds`."""
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
    return _adopted(engine, replace(plan, policy=preset))


class PolicyChoice(NamedTuple):
    """A policy and its options, as requested."""

    policy: str
    options: Mapping[str, str]
    seed: int
    twins: BuddyTwins | None  # compiled, where kernels may be and layers wait for decisions

    @classmethod
    def of(cls, options: RunOptions, has_device: bool = False) -> PolicyChoice:
        asked = options.asked
        is_compiled = (options.changes_words or has_device) and asked.kernels != "reference"
        twins = compiled_buddies() if is_compiled else None
        return cls(asked.policy, asked.policy_options, asked.seed or 0, twins)


def policy_inputs(
    choice: PolicyChoice,
    plan: MemoryPlan,
    num_experts: int,
    calibration: Calibration | None,
    costs: Costs,
) -> PolicyInputs:
    """Make the inputs of the preset's policies.

    Raises UsageError for `tau=paper` without a calibration.
    """
    options = parse_options(choice.policy, choice.options)
    if (partitions := options.get(PARTITIONS.name, 1)) != 1:
        raise UsageError(
            f"partitions={partitions} is for lowtide simulate: here experts lie on one device, and "
            "every hop is 0."
        )
    if options.get("tau") is SolvedTau.PAPER:
        options["tau"] = _paper_tau(plan, calibration, costs)
    inputs = PolicyInputs(
        plan.residents_per_layer,
        num_experts,
        costs,
        options=options,
        on_tau_change=_log_tau,
        seed=choice.seed,
        twins=choice.twins,
    )
    if calibration is None:
        return inputs
    return replace(
        inputs,
        frequency=calibration.frequency,
        following=calibration.following,
        hits=calibration.trace.hits(),
        buddies=calibration.buddies,
    )


def measure_compute(
    layout: SlotLayout, shape: MoEShape, kernels: Kernels, cores_per_expert: int
) -> Callable[[], Curve]:
    """Return a function that measures how long an expert in memory takes, by its tokens."""
    return lambda: measure_device_s(layout, shape, kernels, cores_per_expert)


def make_engine_policies(
    choice: PolicyChoice,
    plan: MemoryPlan,
    calibration: Calibration | None,
    compute_s: Callable[[], Curve],
    host: HostTier,
    device: DeviceTier | None,
) -> Policies:
    """Make the policies of the plan's preset for these tiers.

    compute_s: from `measure_compute`. Raises UsageError for `tau=paper` without a calibration,
    StorageError if an expert cannot be read.
    """
    num_experts = host.ledger.num_experts
    if device is None:
        costs = _disk_costs(choice, host, plan.policy, compute_s)
    else:
        costs = device.costs
    inputs = policy_inputs(choice, plan, num_experts, calibration, costs)
    if device is None:
        policies = recipe(plan.policy).policies_without_device(inputs)
        unused = recipe(plan.policy).unused_without_device
        if unused and choice.policy == plan.policy and not plan.everything_fits:
            _log.warning(
                "Without a device %s is its placement%s alone: its %s %s not used.",
                plan.policy,
                "" if policies.substitution is None else " and its substitution",
                " and its ".join(unused),
                "are" if len(unused) > 1 else "is",
            )
    else:
        policies = make_policies(plan.policy, inputs, everything_fits=plan.everything_fits)
    return replace(policies, solved=_solved(choice, plan, inputs))


def with_sizes(plan: MemoryPlan, choice: PolicyChoice, experts: ExpertRuntime) -> MemoryPlan:
    """Return the plan with the numbers that its policy derives from its options."""
    if plan.everything_fits:
        return plan
    num_experts, has_device = experts.host.ledger.num_experts, plan.gpu is not None
    sizes = sizes_of(plan.policy, choice.policy, choice.options, num_experts, has_device=has_device)
    told = ", ".join(filter(None, [sizes, experts.policies.solved]))
    return replace(plan, policy_sizes=told)


def set_early_gate(
    experts: ExpertRuntime | NoExperts,
    routers: Sequence[Router],
    calibration: Calibration | None,
    dtype: torch.dtype,
) -> None:
    """Give a device the features by which its prefetch policy predicts.

    Without a calibration they are used uncorrected. dtype: the compute type.
    """
    if isinstance(experts, NoExperts) or experts.device is None:
        return
    residual, gate = None, experts.policies.prefetch.gate
    if gate is Gate.RESIDUAL and calibration is not None:
        torch_device = experts.device.device.torch_device
        residual = torch.tensor(calibration.residual, dtype=dtype, device=torch_device)
    routes = [_route(router) for router in routers]
    experts.device.early_gate = EarlyGate(gate, routes, residual, experts.host.ledger.num_experts)


def _adopted(engine: Engine, plan: MemoryPlan) -> Engine:
    """Return the engine under the plan's policy, made from the engine's options."""
    experts, options, planner = engine.experts, engine.options, engine.planner
    if isinstance(experts, NoExperts):
        return engine
    calibration = find_calibration(engine.facts, options.asked.calibration)
    host, device = experts.host, experts.device
    shape, cores_per_expert = engine.model.config.moe_shape, engine.executor.cores_per_expert
    compute_s = measure_compute(host.slots.layout, shape, engine.kernels, cores_per_expert)
    choice = PolicyChoice.of(options, engine.plan.gpu is not None)
    policies = make_engine_policies(choice, plan, calibration, compute_s, host, device)
    if engine.moving is not None:
        engine.moving.restore()
    experts.adopt(policies, options.asked.report)
    plan = with_sizes(plan, choice, experts)
    if engine.pass_plans is not None and planner.pass_planner is not None:
        engine.pass_plans.planner = planner.pass_planner
    set_early_gate(experts, engine.model.routers, calibration, engine.kv_cache.dtype)
    return replace(engine, plan=plan)


def _check_workspace(planner: Planner, plan: MemoryPlan, policy: str) -> None:
    """Raise PlanError if a policy needs a larger workspace than was planned."""
    needed_bytes, planned_bytes = planner.workspace_bytes()[0], plan.fast_tier.workspace_bytes
    if needed_bytes > planned_bytes:
        raise PlanError(
            f"Policy {policy!r} needs a workspace of {needed_bytes} bytes for the "
            f"routing that it asks for, and {planned_bytes} are planned; open the model with it."
        )


def _solved(choice: PolicyChoice, plan: MemoryPlan, inputs: PolicyInputs) -> str:
    """Describe the interval that `tau=paper` resolved to; "" if the policy has no such option."""
    tau = parse_options(choice.policy, choice.options).get(TAU.name)
    is_used = tau is SolvedTau.PAPER and TAU.name in options_of(plan.policy)
    return f"tau {TAU.of(inputs)} by the paper" if is_used else ""


def _route(router: Router) -> Route:
    """Return a router for predictions: without the window that tokens of a block share."""
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


def _disk_costs(
    choice: PolicyChoice, host: HostTier, preset: str, compute_s: Callable[[], Curve]
) -> Costs:
    """Measure an absent expert's costs where it is always read, on the first experts.

    For policies that do not use costs nothing is measured, and every time is 0.
    """
    slot_bytes = host.slots.layout.num_bytes
    tau = parse_options(choice.policy, choice.options).get("tau")
    if not (recipe(preset).weighs_moves or isinstance(tau, FollowDrift | SolvedTau)):
        return Costs.unknown(slot_bytes)
    host.pause()  # reads that were begun for a coming layer have slots
    if not host.ledger.num_free:
        host.keep(0, np.empty(0, np.int64))  # another policy's, who may want them read again
    read_s = _read_s(host, min(8, host.ledger.num_experts, host.ledger.num_free))
    in_memory_s = compute_s()
    absent_s = Curve([(n, max(read_s, in_memory_s.at(n))) for n in (1, MAX_PASS_ROWS)])
    return Costs(slot_bytes, read_s, absent_s, in_memory_s, in_memory_s, 0.0)


def _read_s(host: HostTier, num_probes: int) -> float:
    """Return the seconds per expert when `num_probes` are read at once."""
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
