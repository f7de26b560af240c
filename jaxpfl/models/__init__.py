"""Networks as pure functions over pytrees of parameters."""

from typing import TYPE_CHECKING

from jaxpfl import lazy

if TYPE_CHECKING:
    from jaxpfl.models.base import PAD as PAD
    from jaxpfl.models.base import Batch as Batch
    from jaxpfl.models.base import Metrics as Metrics
    from jaxpfl.models.base import Model as Model
    from jaxpfl.models.base import Params as Params
    from jaxpfl.models.base import count_parameters as count_parameters
    from jaxpfl.models.base import summarise as summarise
    from jaxpfl.models.classifiers import CNN as CNN
    from jaxpfl.models.classifiers import MLP as MLP
    from jaxpfl.models.classifiers import classifier_cnn as classifier_cnn
    from jaxpfl.models.classifiers import emnist_cnn as emnist_cnn
    from jaxpfl.models.decoder.config import DecoderConfig as DecoderConfig
    from jaxpfl.models.decoder.config import LoRA as LoRA
    from jaxpfl.models.decoder.network import Decoder as Decoder
    from jaxpfl.models.encoder.config import EncoderConfig as EncoderConfig
    from jaxpfl.models.encoder.network import Encoder as Encoder
    from jaxpfl.models.gan import GAN as GAN
    from jaxpfl.models.gan import sample_images as sample_images
    from jaxpfl.models.own import OwnModel as OwnModel
    from jaxpfl.models.own import from_flax as from_flax
    from jaxpfl.models.own import from_functions as from_functions
    from jaxpfl.models.recurrent import CIFGLanguageModel as CIFGLanguageModel
    from jaxpfl.models.recurrent import LSTMLanguageModel as LSTMLanguageModel
    from jaxpfl.models.resnet import MultiLabelResNet as MultiLabelResNet
    from jaxpfl.models.resnet import ResNet as ResNet

__getattr__, __dir__, __all__ = lazy.face(__name__)
