"""One optimizer step and one evaluation step, as pure functions for `jax.jit`."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import meshes
from k3jax import ops
from k3jax.data.bytes import NUM_BYTES
from k3jax.model import next_token_loss
from k3jax.model.loss import target_mask, token_losses
from k3jax.model.pipeline import hold_identities
from k3jax.nn.balancing import auxiliary_loss, balance_routers
from k3jax.train.config import TrainConfig
from k3jax.train.optimizer import learning_rate, make_optimizer
from k3jax.train.state import ModelParts, TrainState


def make_train_step(parts: ModelParts, config: TrainConfig):
    """(step, optimizer): `step(state, batch) -> (state, metrics)`.

    The batch holds "tokens" and "segment_ids" [B, T] and perhaps "media" (`k3jax.data.loader`); it
    is computed in `config.micro_batches` parts. The loss
    is the mean over all targets of the batch, however they fall into parts. A step whose loss or
    gradient is not finite changes nothing but the counters.
    """
    balancing = config.balancing
    optimizer = make_optimizer(config.optimizer, parts.param_names, parts.matrix_names)
    schedule = learning_rate(config.optimizer, config.steps)

    def gradients(params, rest, batch):
        """Sums over targets, so that parts can be added."""

        def total_loss(params):
            loss, metrics = next_token_loss(
                parts.join(params, rest),
                **batch,
                remat=config.remat,
                auxiliary=balancing.rule == "aux",
                parallel=config.parallel,
            )
            count, statistics = metrics["num_targets"], metrics["statistics"]
            total, auxiliary = loss * count, jnp.zeros(())
            if balancing.rule == "aux" and statistics is not None:
                auxiliary = count * auxiliary_loss(statistics, parts.cfg.moe.experts_per_token)
            sums = (total, auxiliary), count, statistics
            return total + balancing.aux_weight * auxiliary, sums

        (_, sums), grads = jax.value_and_grad(total_loss, has_aux=True)(params)
        if config.micro_batches > 1:
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        return *sums, grads

    def accumulate(params, rest, batch):
        if config.micro_batches == 1:
            return gradients(params, rest, batch)
        split = jax.tree.map(lambda x: split_rows(x, config.micro_batches), batch)
        first = jax.tree.map(lambda x: x[0], split)
        shapes = jax.eval_shape(gradients, params, rest, first)
        zero = jax.tree.map(_zeros, shapes)

        def add(sums, part):
            return jax.tree.map(jnp.add, sums, gradients(params, rest, part)), None

        return jax.lax.scan(add, zero, split)[0]

    def step(state: TrainState, batch: dict):
        sums, count, statistics, grads = accumulate(state.params, state.rest, batch)
        total, auxiliary = sums
        targets = jnp.maximum(count, 1).astype(jnp.float32)
        loss, scale, rate = total / targets, 1 / targets, schedule(state.step)

        def change(grads, moments, weights):
            """Gradients per target and changes of the weights, in float32, and new moments."""
            grads = {name: grad.astype(jnp.float32) * scale for name, grad in grads.items()}
            updates, moments = optimizer.update(grads, moments, weights)
            return grads, {name: rate * update for name, update in updates.items()}, moments

        with jax.named_scope("optimizer"):
            weights = state.params | state.master
            inputs = grads, state.optimizer, weights
            scaled, changes, _ = change(*inputs)
            squares = jnp.stack([jnp.sum(jnp.square(scaled[name])) for name in parts.param_names])
            norm = jnp.sqrt(jnp.sum(squares))
            # A finite gradient can still give an update that is not (0 / 0 in the moments).
            moved = jnp.stack([jnp.sum(jnp.square(changes[name])) for name in parts.param_names])
            finite = jnp.isfinite(loss) & jnp.isfinite(norm) & jnp.isfinite(moved).all()
            # The changes are made a second time once `finite` is known, from arrays that are in
            # memory anyway: kept until then, they would need as much memory as the state.
            finite, inputs = jax.lax.optimization_barrier((finite, inputs))
            _, changes, moments = change(*inputs)
            _, old_moments, weights = inputs
            new = {name: value - changes[name] for name, value in weights.items()}
            new = hold_identities(new, weights, parts.cfg)
        rest = state.rest
        if statistics is not None:
            with jax.named_scope("balance_routers"):
                balanced = balance_routers(
                    parts.join(state.params, state.rest),
                    statistics,
                    rule=balancing.rule,
                    sign_rate=balancing.sign_rate,
                )
                rest = parts.split(balanced)[1]

        def keep(new, old):
            return jax.tree.map(lambda n, o: jnp.where(finite, n.astype(o.dtype), o), new, old)

        # All old values are those behind the barrier: of two readers one would get a copy.
        weights = keep(new, weights)
        params = {name: weights[name].astype(old.dtype) for name, old in state.params.items()}
        missed = 1 - finite.astype(jnp.int32)
        state = TrainState(
            params=params,
            master={name: weights[name] for name in state.master},
            rest=keep(rest, state.rest),
            optimizer=keep(moments, old_moments),
            step=state.step + 1,
            skipped=state.skipped + missed,
            skipped_in_row=(state.skipped_in_row + 1) * missed,
            key=state.key,
        )
        metrics = {
            "loss": loss,
            "targets": count,
            "grad_norm": norm,
            "lr": rate,
            "finite": finite,
            # By parameter, for the diagnosis.
            "finite_gradient": jnp.isfinite(squares) & jnp.isfinite(moved),
            "skipped": state.skipped,
            "skipped_in_row": state.skipped_in_row,
        }
        if statistics is not None:
            biases = [state.rest[name] for name in parts.router_names]
            metrics["overload"] = statistics.overload()
            metrics["router_bias_min"] = jnp.min(jnp.stack([jnp.min(b) for b in biases]))
            metrics["router_bias_max"] = jnp.max(jnp.stack([jnp.max(b) for b in biases]))
            if statistics.load is not None:
                metrics["exchange_load"] = statistics.load
            if balancing.rule == "aux":
                metrics["auxiliary_loss"] = auxiliary / targets
        return state, metrics

    return step, optimizer


def split_rows(x: jax.Array, parts: int) -> jax.Array:
    """[B, ...] -> [parts, B / parts, ...], consecutive rows together, each part on all devices.

    On a mesh the rows change devices: an all-gather of what is small, token ids and pictures.
    """
    rows, *others = meshes.spec_of(x)
    x = meshes.reshard(x, P(None, *others))
    x = x.reshape(parts, -1, *x.shape[1:])
    return meshes.reshard(x, P(None, rows, *others))


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros that lie where an array of this type does."""
    spec = leaf.sharding.spec if meshes.has_mesh() else None
    return jnp.zeros(leaf.shape, leaf.dtype, out_sharding=spec)


def make_evaluation_step(parts: ModelParts):
    """`evaluate(params, rest, tokens, segment_ids)` -> sums over byte targets.

    Returns a dictionary: "nats" [] float32 over targets that are bytes (control ids excluded; the
    probability is over the whole vocabulary), "targets" [] int32, and "expert_counts" [M, E] int32
    where the model has experts.
    """

    def evaluate(params, rest, tokens, segment_ids):
        _, metrics = next_token_loss(parts.join(params, rest), tokens, segment_ids)
        tokens, segment_ids = ops.whole_tokens(tokens), ops.whole_tokens(segment_ids)
        is_byte = target_mask(tokens, segment_ids) & (tokens[:, 1:] < NUM_BYTES)
        result = {
            "nats": jnp.where(is_byte, metrics["token_losses"], 0.0).sum(),
            "targets": is_byte.sum(dtype=jnp.int32),
        }
        if metrics["statistics"] is not None:
            result["expert_counts"] = metrics["statistics"].expert_counts
            if metrics["statistics"].load is not None:
                result["exchange_load"] = metrics["statistics"].load
        return result

    return evaluate


def make_reading_step(parts: ModelParts):
    """`read(params, rest, tokens, segment_ids, media, answers)` -> sums over answers.

    answers [B, T] bool marks the bytes of the texts that stand after their pictures. Returns
    "nats" [] float32, "targets" [] int32, and "guesses" [B, T-1] int32, the likeliest next tokens.
    """

    def read(params, rest, tokens, segment_ids, media, answers):
        logits, _, _ = parts.join(params, rest).forward(tokens, segment_ids, media=media)
        logits, tokens, answers = map(ops.whole_tokens, (logits, tokens, answers))
        losses = token_losses(logits, tokens)
        wanted = answers[:, 1:]
        return {
            "nats": jnp.where(wanted, losses, 0.0).sum(),
            "targets": wanted.sum(dtype=jnp.int32),
            "guesses": jnp.argmax(logits[:, :-1], axis=-1).astype(jnp.int32),
        }

    return read
