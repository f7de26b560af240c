"""Rounds of TensorFlow Federated: its FedAvg with its DP aggregator on its C++ runtime.

python -m benchmarks.peers.tff_round FILE [quiet]

The network is TensorFlow's ordinary one. The noise hides the norm of the mean change: with "quiet"
there is none, and rounds answer with the norm; otherwise with null.
"""

import importlib.metadata
import sys

import numpy as np
import tensorflow as tf  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
import tensorflow_federated as tff  # pyright: ignore[reportMissingImports]

from benchmarks.peers import work


@tf.function
def logits(weights, x, training):
    (kernel_0, bias_0, kernel_1, bias_1, hidden, hidden_bias, output, output_bias), _ = weights
    x = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel_0, 1, "VALID"), bias_0))
    x = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel_1, 1, "VALID"), bias_1))
    x = tf.reshape(tf.nn.max_pool2d(x, 2, 2, "VALID"), [-1, hidden.shape[0]])
    x = tf.nn.relu(tf.matmul(x, hidden) + hidden_bias)
    return tf.matmul(x, output) + output_bias


@tf.function
def loss(output, label, sample_weight=None):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(label, output)
    return tf.reduce_mean(losses)


def main(file: str, quiet: bool) -> None:
    tff.backends.native.set_sync_local_cpp_execution_context()
    arrays, held = work.load(file)
    pairs = list(work.each(held))
    clients = [
        tf.data.Dataset.from_tensor_slices((image, label.astype(np.int32))).batch(work.BATCH)
        for image, label in pairs
    ]
    model = tff.learning.models.FunctionalModel(
        initial_weights=(tuple(arrays.values()), ()),
        predict_on_batch_fn=logits,
        loss_fn=loss,
        input_spec=clients[0].element_spec,
    )
    process = tff.learning.algorithms.build_unweighted_fed_avg(
        model,
        client_optimizer_fn=tff.learning.optimizers.build_sgdm(work.LEARNING_RATE),
        model_aggregator=tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
            0.0 if quiet else work.NOISE, len(clients), work.CLIP_NORM
        ),
    )
    start = process.initialize()

    def round_() -> float | None:
        new = process.next(start, clients).state.global_model_weights.trainable
        if not quiet:
            return None
        changes = [(leaf - old).ravel() for leaf, old in zip(new, arrays.values(), strict=True)]
        return float(np.linalg.norm(np.concatenate(changes)))

    versions = ("tensorflow-federated", "tensorflow")
    work.serve(round_, **{name: importlib.metadata.version(name) for name in versions})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] == ["quiet"])
