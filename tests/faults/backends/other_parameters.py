"""The accelerated engine with one thing read wrongly from the checkpoint."""

import dataclasses

from day0check.backends.accelerated import Accelerated


class OtherTheta(Accelerated):
    """Rotates with the base of another release."""

    def load(self, model_dir, profile, device, layout):
        super().load(model_dir, profile, device, layout)
        config = self._engine.config
        self._engine.config = dataclasses.replace(config, rope=dataclasses.replace(config.rope, theta=1e6))


class OtherScaleByte(Accelerated):
    """One bit of one of the scales of one expert, the last of a layer."""

    def load(self, model_dir, profile, device, layout):
        super().load(model_dir, profile, device, layout)
        self._engine.model.layers[6].mlp.w3.scale[15, 0, 0] ^= 1
