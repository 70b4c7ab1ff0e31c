"""Small models that were trained for the tests."""

from specdec.utils.process import prepare_process

prepare_process()  # training in float32 takes OpenBLAS
