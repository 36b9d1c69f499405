"""Every data set there is."""

from coterie.data.sources import cifar, gpt2, idx, imagenets, languages
from coterie.data.sources.spec import Spec

CATALOGUE: tuple[Spec, ...] = (
    cifar.CIFAR10,
    cifar.CIFAR100,
    idx.MNIST,
    idx.FASHION,
    imagenets.MINI,
    imagenets.TINY,
    languages.SPEC,
    gpt2.SPEC,
)
