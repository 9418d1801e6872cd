"""The learner leaves a GPU that it shares with a rollout engine, and comes back (`rollout.colocation`)."""

from pnpo_megatron.errors import ConfigError
from pnpo_megatron.policy.learner import MegatronLearner


class LearnerMemory:
    """Gradient buffers, master weights and optimizer states of this rank. Not collective."""

    def __init__(self, learner: MegatronLearner) -> None:
        """Raise ConfigError where the optimizer steps the model's own tensors.

        Megatron moves the optimizer's tensors to the host and back by replacing their storage: those that
        are views of the model's parameters would come back as copies, and training would go nowhere.
        """
        self._learner = learner
        model = {
            parameter.untyped_storage().data_ptr()
            for chunk in learner.chunks
            for parameter in chunk.parameters()
        }
        parts = learner.optimizer.chained_optimizers
        groups = [group for part in parts for group in part.optimizer.param_groups]
        if any(one.untyped_storage().data_ptr() in model for group in groups for one in group["params"]):
            raise ConfigError(
                'rollout.colocated = true with model.dtype = "float32": the optimizer steps the weights '
                'themselves and cannot leave the GPU without them; use "bfloat16"'
            )

    def offload(self) -> None:
        """Gradients are dropped, master weights and optimizer states go to the host."""
        if self._learner.first_epoch:
            self._learner.first_epoch.forget()
        for chunk in self._learner.chunks:
            chunk.offload_grad_buffers()
        self._learner.optimizer.offload_to_cpu()

    def reload(self) -> None:
        """The optimizer comes back first: its tensors are the larger ones."""
        self._learner.optimizer.restore_from_cpu()
        for chunk in self._learner.chunks:
            chunk.restore_grad_buffers()
