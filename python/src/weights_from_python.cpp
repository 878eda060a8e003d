// ExpertWeights of Python as views of the library: sources, owners, versions. Single tensors are in
// tensor_from_python.cpp.
#include <nanobind/stl/string.h>

#include <atomic>
#include <memory>
#include <utility>

#include "checkpoint_layer.h"
#include "from_python.h"
#include "fusedmoe/error.h"
#include "scales_from_python.h"
#include "tensor_from_python.h"

namespace fusedmoe::python {
namespace {

BiasTensor to_bias(const char* name, nb::handle object, std::vector<nb::object>& owners) {
  if (object.is_none()) return {};
  const Array array = dense(name, object, owners);
  const MatrixView view = to_matrix(name, array);
  return {view.data, view.dtype, view.rows, view.columns};
}

struct Held {
  std::vector<nb::object> objects;
  Held* next = nullptr;
};

// What C++ has dropped and Python has not yet destroyed. The library drops owners inside its locks,
// on any thread: waiting for the GIL there could meet a fork, which holds it and waits for them.
std::atomic<Held*> g_dropped{nullptr};

int drop_all(void* /*unused*/) {  // with the GIL
  for (Held* held = g_dropped.exchange(nullptr); held != nullptr;) {
    Held* const next = held->next;
    delete held;
    held = next;
  }
  return 0;
}

void drop_later(Held* held) {
  held->next = g_dropped.load();
  while (!g_dropped.compare_exchange_weak(held->next, held)) {
  }
  // When Python's queue is full, the next one takes all with it.
  if (Py_IsInitialized() != 0) Py_AddPendingCall(&drop_all, nullptr);
}

}  // namespace

std::shared_ptr<const void> hold(std::vector<nb::object> objects) {
  drop_all(nullptr);
  return {new Held{std::move(objects)}, &drop_later};
}

ExpertWeights to_weights(nb::handle object, const Device& device) {
  if (nb::isinstance<CheckpointWeights>(object)) {
    ExpertWeights weights = nb::cast<const CheckpointWeights&>(object).weights;
    weights.owner = hold({nb::borrow(object)});
    return weights;
  }
  if (!nb::hasattr(object, "w13_bias")) {
    refuse("weights", "an ExpertWeights", to_text(object.type().attr("__name__")), "build one");
  }
  ExpertWeights weights;
  std::vector<nb::object> owners;
  weights.w13 = to_tensor("weights.w13", object.attr("w13"), device, owners);
  weights.w13_up = to_tensor("weights.w13_up", object.attr("w13_up"), device, owners);
  weights.w2 = to_tensor("weights.w2", object.attr("w2"), device, owners);
  weights.w13_bias = to_bias("weights.w13_bias", object.attr("w13_bias"), owners);
  weights.w2_bias = to_bias("weights.w2_bias", object.attr("w2_bias"), owners);
  weights.owner = hold(std::move(owners));
  if (const nb::object version = object.attr("version"); !version.is_none()) {
    if (!nb::isinstance<WeightsVersion>(version)) {
      refuse("weights.version", "a WeightsVersion", to_text(version.type().attr("__name__")),
             "build one and bump() it after each change");
    }
    weights.version = &nb::cast<WeightsVersion&>(version).value;
    weights.version_owner = hold({version});
  }
  if (const nb::object source = object.attr("source"); !source.is_none()) {
    struct Yielded {
      std::shared_ptr<const void> owner;  // of the callable
      nb::handle callable;
      // Between two calls the views of the first stay alive, as the source's contract asks.
      std::shared_ptr<const void> last;
    };
    auto yielded = std::make_shared<Yielded>(Yielded{hold({source}), source, nullptr});
    weights.source = [yielded, device](std::int64_t local_expert) {
      const nb::gil_scoped_acquire gil;
      ExpertWeights one = to_weights(yielded->callable(local_expert), device);
      yielded->last = one.owner;
      return one;
    };
  }
  return weights;
}

}  // namespace fusedmoe::python
