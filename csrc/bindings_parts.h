// Registers the ops that run a part of a decoder layer from end to end with the module that bindings.cpp
// opens.
#pragma once

#include <pybind11/pybind11.h>

void bind_attend(pybind11::module_& m);
void bind_ffn(pybind11::module_& m);
