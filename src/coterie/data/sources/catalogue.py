"""Every data set there is."""

from coterie.data.sources import (
    cifar,
    clinics,
    goemotions,
    gpt2,
    heart,
    idx,
    imagenets,
    ixi,
    languages,
    minilm,
    trec,
    wiki40b,
)
from coterie.data.sources.spec import Spec

CATALOGUE: tuple[Spec, ...] = (
    cifar.CIFAR10,
    cifar.CIFAR100,
    idx.MNIST,
    idx.FASHION,
    imagenets.MINI,
    imagenets.TINY,
    languages.SPEC,
    wiki40b.SPEC,
    trec.SPEC,
    goemotions.SPEC,
    heart.SPEC,
    clinics.SPEC,
    ixi.SPEC,
    minilm.SPEC,
    gpt2.TOKENIZER,
    gpt2.MODEL,
)
