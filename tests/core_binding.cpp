// csrc/core for the tests: the phase arithmetic of an axis, a problem's counts, and the checks of arguments.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "../csrc/core/arguments.h"
#include "../csrc/core/plan.h"
#include "../csrc/core/problem.h"
#include "../csrc/core/tuning.h"

namespace py = pybind11;
using fastconvt::Axis;
using fastconvt::Operation;
using fastconvt::Problem;

namespace {

using List = std::vector<int64_t>;
using Tensor = std::tuple<std::string, List, std::string, std::string>;  // name, sizes, dtype, device

Problem check_arguments(const std::string& op, int spatial, const std::deque<Tensor>& tensors, List stride,
                        List padding, List output_padding, int64_t groups, List dilation) {
  fastconvt::Arguments arguments;
  arguments.op = op;
  arguments.spatial = spatial;
  for (const auto& [name, sizes, dtype, device] : tensors) {
    arguments.tensors.push_back({name.c_str(), sizes, dtype, device});
  }
  arguments.stride = std::move(stride);
  arguments.padding = std::move(padding);
  arguments.output_padding = std::move(output_padding);
  arguments.dilation = std::move(dilation);
  arguments.groups = groups;
  return fastconvt::check_arguments(arguments);
}

// The plan on a GPU of this compute capability, whose kernels cannot run for the reason `refusal`, "" if they can.
std::string plan_on_gpu(Operation operation, const Problem& problem, int capability, const std::string& refusal,
                        const std::string& forced) {
  fastconvt::DeviceInfo device;
  device.cuda = true;
  device.capability = capability;
  device.refusal = refusal;
  return fastconvt::make_plan(operation, problem, device, forced).to_json();
}

fastconvt::DeviceInfo gpu_named(const std::string& name) {
  fastconvt::DeviceInfo device;
  device.cuda = true;
  device.name = name;
  return device;
}

}  // namespace

PYBIND11_MODULE(core_binding, m) {
  py::class_<Axis>(m, "Axis")
      .def(py::init([](int64_t in, int64_t kernel, int64_t stride, int64_t padding, int64_t output_padding,
                       int64_t dilation) { return Axis{in, kernel, stride, padding, output_padding, dilation}; }))
      .def("out", &Axis::out)
      .def("phase", &Axis::phase)
      .def("base", &Axis::base)
      .def("tap_step", &Axis::tap_step)
      .def("first_tap", &Axis::first_tap)
      .def("num_taps", &Axis::num_taps)
      .def("offset", &Axis::offset)
      .def("first_output", &Axis::first_output)
      .def("num_outputs", &Axis::num_outputs)
      .def("num_pairs", &Axis::num_pairs);
  py::class_<Problem>(m, "Problem")
      .def_readonly("batch", &Problem::batch)
      .def_readonly("out_channels", &Problem::out_channels)
      .def_readonly("axis", &Problem::axis)
      .def_readwrite("allow_tf32", &Problem::allow_tf32)
      .def_property(
          "channels_last", [](const Problem& p) { return p.layout == fastconvt::Layout::kChannelsLast; },
          [](Problem& p, bool last) {
            p.layout = last ? fastconvt::Layout::kChannelsLast : fastconvt::Layout::kContiguous;
          })
      .def_property(
          "channels_last_weight", [](const Problem& p) { return p.weight_layout == fastconvt::Layout::kChannelsLast; },
          [](Problem& p, bool last) {
            p.weight_layout = last ? fastconvt::Layout::kChannelsLast : fastconvt::Layout::kContiguous;
          })
      .def_property(
          "activation", [](const Problem& p) { return fastconvt::activation_name(p.activation); },
          [](Problem& p, const std::string& name) { p.activation = fastconvt::find_activation(name).value(); })
      .def("element_size", &Problem::element_size)
      .def("macs", &Problem::macs)
      .def("bytes", &Problem::bytes);
  m.def("check_arguments", &check_arguments);
  py::enum_<Operation>(m, "Operation")
      .value("CONV_TRANSPOSE", Operation::kConvTranspose)
      .value("INPUT_GRADIENT", Operation::kInputGradient)
      .value("WEIGHT_GRADIENT", Operation::kWeightGradient)
      .value("CHAIN", Operation::kLogSumExpHardswish)
      .value("CHAIN_GRADIENTS", Operation::kChainGradients);
  m.def("plan_on_gpu", &plan_on_gpu);
  m.def("set_autotune_folder", &fastconvt::set_autotune_folder);
  m.def("tuned_candidate", [](Operation operation, const Problem& problem, const std::string& gpu) {
    return fastconvt::tuned_candidate(operation, problem, gpu_named(gpu));
  });
  m.def("wants_measurement", [](Operation operation, const Problem& problem, const std::string& gpu) {
    return fastconvt::wants_measurement(operation, problem, gpu_named(gpu));
  });
  m.def("keep_measurement", [](Operation operation, const Problem& problem, const std::string& gpu,
                               const std::string& fastest, const std::map<std::string, double>& times) {
    std::vector<fastconvt::Timing> timings;
    for (const auto& [name, ms] : times) timings.push_back({name, ms});
    fastconvt::keep_measurement(operation, problem, gpu_named(gpu), fastest, timings);
  });
}
