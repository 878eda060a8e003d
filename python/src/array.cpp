#include "array.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <optional>
#include <utility>

#include "fusedmoe/error.h"

namespace fusedmoe::python {
namespace {

struct ElementName {
  Element element;
  std::int64_t bytes;
  const char* name;    // ours, for messages
  const char* torch;   // torch's
  const char* scalar;  // how TensorView and NumPy's extension types say it
};

constexpr std::array kElements = {
    ElementName{Element::f32, 4, "float32", "torch.float32", "f32"},
    ElementName{Element::f16, 2, "float16", "torch.float16", "f16"},
    ElementName{Element::bf16, 2, "bfloat16", "torch.bfloat16", "bf16"},
    ElementName{Element::f64, 8, "float64", "torch.float64", "f64"},
    ElementName{Element::i64, 8, "int64", "torch.int64", "i64"},
    ElementName{Element::i32, 4, "int32", "torch.int32", "i32"},
    ElementName{Element::i16, 2, "int16", "torch.int16", "i16"},
    ElementName{Element::i8, 1, "int8", "torch.int8", "i8"},
    ElementName{Element::u8, 1, "uint8", "torch.uint8", "u8"},
    ElementName{Element::u16, 2, "uint16", "torch.uint16", "u16"},
    ElementName{Element::boolean, 1, "bool", "torch.bool", "bool"},
    ElementName{Element::fp8_e4m3, 1, "float8_e4m3fn", "torch.float8_e4m3fn", "fp8_e4m3"},
    ElementName{Element::fp8_e5m2, 1, "float8_e5m2", "torch.float8_e5m2", "fp8_e5m2"},
    ElementName{Element::fp8_e4m3fnuz, 1, "float8_e4m3fnuz", "torch.float8_e4m3fnuz",
                "fp8_e4m3fnuz"},
    ElementName{Element::fp8_e5m2fnuz, 1, "float8_e5m2fnuz", "torch.float8_e5m2fnuz",
                "fp8_e5m2fnuz"},
    ElementName{Element::e8m0, 1, "float8_e8m0fnu", "torch.float8_e8m0fnu", "e8m0"},
    ElementName{Element::fp4_x2, 1, "float4_e2m1fn_x2", "torch.float4_e2m1fn_x2", "fp4_x2"},
};

const ElementName* find_element(const std::string& name) {
  for (const ElementName& entry : kElements) {
    if (name == entry.name || name == entry.torch || name == entry.scalar) return &entry;
  }
  return nullptr;
}

Element from_dlpack(const nb::dlpack::dtype& dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto code = static_cast<Code>(dtype.code);
  const auto of_width = [&](Element bits8, Element bits16, Element bits32, Element bits64) {
    return dtype.bits == 8    ? bits8
           : dtype.bits == 16 ? bits16
           : dtype.bits == 32 ? bits32
           : dtype.bits == 64 ? bits64
                              : Element::other;
  };
  constexpr Element kNone = Element::other;
  if (code == Code::Float4_E2M1FN && dtype.lanes == 2) return Element::fp4_x2;
  if (dtype.lanes != 1) return kNone;
  switch (code) {
    case Code::Int:
      return of_width(Element::i8, Element::i16, Element::i32, Element::i64);
    case Code::UInt:
      return of_width(Element::u8, Element::u16, kNone, kNone);
    case Code::Float:
      return of_width(kNone, Element::f16, Element::f32, Element::f64);
    case Code::Bfloat:
      return Element::bf16;
    case Code::Bool:
      return Element::boolean;
    case Code::Float8_E4M3FN:
      return Element::fp8_e4m3;
    case Code::Float8_E5M2:
      return Element::fp8_e5m2;
    case Code::Float8_E4M3FNUZ:
      return Element::fp8_e4m3fnuz;
    case Code::Float8_E5M2FNUZ:
      return Element::fp8_e5m2fnuz;
    case Code::Float8_E8M0FNU:
      return Element::e8m0;
    default:
      return kNone;
  }
}

std::string device_text(int type, int id) {
  const char* kind = type == nb::device::cuda::value     ? "cuda"
                     : type == nb::device::oneapi::value ? "xpu"
                                                         : "device";
  return std::string(kind) + ":" + std::to_string(id);
}

// torch.Tensor once torch is imported: attributes cost a fifth of a DLPack capsule, and tell of
// parameters that require gradients, which DLPack refuses.
struct Torch {
  nb::object tensor_type;
  std::array<nb::object, kElements.size()> dtypes;

  // Null as long as nobody imported torch.
  static const Torch* find() {
    static Torch* found = nullptr;  // never destroyed: Python may be gone by then
    if (found != nullptr) return found;
    nb::dict modules = nb::borrow<nb::dict>(nb::module_::import_("sys").attr("modules"));
    if (!modules.contains("torch")) return nullptr;
    nb::object module = modules["torch"];
    // Another thread may still be importing it: dtypes come after the class.
    if (!nb::hasattr(module, "Tensor") || !nb::hasattr(module, "bfloat16")) return nullptr;
    auto torch = std::make_unique<Torch>();
    torch->tensor_type = module.attr("Tensor");
    for (std::size_t i = 0; i < kElements.size(); ++i) {
      const char* name = kElements[i].torch + sizeof("torch.") - 1;
      if (nb::hasattr(module, name)) torch->dtypes[i] = module.attr(name);
    }
    found = torch.release();
    return found;
  }
};

bool is_instance(nb::handle object, const nb::object& type) {
  return PyType_IsSubtype(Py_TYPE(object.ptr()), reinterpret_cast<PyTypeObject*>(type.ptr())) != 0;
}

void copy_dims(const char* name, nb::handle tuple, int count,
               std::array<std::int64_t, Array::kMaxDims>& to) {
  for (int i = 0; i < count; ++i) {
    const nb::object item = nb::steal(PySequence_GetItem(tuple.ptr(), i));
    const long long value = PyLong_AsLongLong(item.ptr());
    if (value == -1 && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      refuse(name, "a tensor with memory", "one whose sizes are symbols",
             "call the operator torch.ops.fusedmoe.apply inside torch.compile");
    }
    to[i] = value;
  }
}

Array from_torch(const char* name, nb::handle object, const Torch& torch) {
  Array array;
  const nb::object dtype = object.attr("dtype");
  for (std::size_t i = 0; i < kElements.size(); ++i) {
    if (torch.dtypes[i].ptr() != dtype.ptr()) continue;
    array.element = kElements[i].element;
    array.element_bytes = kElements[i].bytes;
  }
  if (array.element == Element::other) {
    array.element_bytes = nb::cast<std::int64_t>(object.attr("element_size")());
  }
  const nb::object shape = object.attr("shape");
  const Py_ssize_t dims = PySequence_Size(shape.ptr());
  if (dims > Array::kMaxDims) {
    refuse(name, "at most 4 dimensions", std::to_string(dims), "reshape it");
  }
  array.num_dims = static_cast<int>(dims);
  copy_dims(name, shape, array.num_dims, array.shape);
  copy_dims(name, object.attr("stride")(), array.num_dims, array.stride);
  if (!nb::cast<bool>(object.attr("is_cpu"))) {
    array.device = to_text(object.attr("device"));
  }
  array.data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(object.attr("data_ptr")()));
  array.owner = nb::borrow(object);
  return array;
}

template <class NdArray>
std::optional<Array> from_ndarray(const char* name, nb::handle object) {
  NdArray view;
  if (!nb::try_cast(object, view)) return std::nullopt;
  if (view.ndim() > Array::kMaxDims) {
    refuse(name, "at most 4 dimensions", std::to_string(view.ndim()), "reshape it");
  }
  Array array;
  array.data = const_cast<void*>(static_cast<const void*>(view.data()));
  array.element = from_dlpack(view.dtype());
  array.element_bytes = (view.dtype().bits * view.dtype().lanes + 7) / 8;
  array.num_dims = static_cast<int>(view.ndim());
  for (int i = 0; i < array.num_dims; ++i) {
    array.shape[i] = static_cast<std::int64_t>(view.shape(i));
    array.stride[i] = view.stride(i);
  }
  if (view.device_type() != nb::device::cpu::value) {
    array.device = device_text(view.device_type(), view.device_id());
  }
  array.owner = nb::cast(view);
  // What the view keeps alive may be a temporary of the conversion; the object itself is not.
  array.owner = nb::make_tuple(array.owner, nb::borrow(object));
  return array;
}

// NumPy knows bf16 and fp8 as extension types (ml_dtypes), which have no DLPack code.
std::optional<Array> from_extension_type(const char* name, nb::handle object, Access access) {
  if (!nb::hasattr(object, "dtype") || !nb::hasattr(object, "view")) return std::nullopt;
  const nb::object dtype = object.attr("dtype");
  if (!nb::hasattr(dtype, "name")) return std::nullopt;
  const ElementName* entry = find_element(to_text(dtype.attr("name")));
  if (entry == nullptr) return std::nullopt;
  switch (entry->element) {
    case Element::bf16:
    case Element::fp8_e4m3:
    case Element::fp8_e5m2:
    case Element::fp8_e4m3fnuz:
    case Element::fp8_e5m2fnuz:
    case Element::e8m0:
      break;
    default:
      return std::nullopt;
  }
  Array array = to_array(name, object.attr("view")(entry->bytes == 2 ? "uint16" : "uint8"), access);
  array.element = entry->element;
  return array;
}

}  // namespace

std::string to_text(nb::handle object) { return nb::cast<std::string>(nb::str(object)); }

void refuse(const std::string& name, const std::string& expected, const std::string& got,
            const std::string& remedy) {
  throw Error(ErrorCode::invalid_argument,
              name + ": expected " + expected + ", got " + got + "; " + remedy);
}

const char* to_string(Element element) noexcept {
  for (const ElementName& entry : kElements) {
    if (entry.element == element) return entry.name;
  }
  return "another dtype";
}

std::int64_t Array::size() const {
  std::int64_t count = 1;
  for (int i = 0; i < num_dims; ++i) count *= shape[i];
  return count;
}

bool Array::contiguous() const {
  std::int64_t expected = 1;
  for (int i = num_dims - 1; i >= 0; --i) {
    if (shape[i] != 1 && stride[i] != expected) return size() == 0;
    expected *= shape[i];
  }
  return true;
}

std::string Array::text() const {
  std::string text = std::string(to_string(element)) + " [";
  for (int i = 0; i < num_dims; ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]" + (device.empty() ? "" : " on " + device);
}

Array to_array(const char* name, nb::handle object, Access access) {
  if (const Torch* torch = Torch::find(); torch != nullptr) {
    if (is_instance(object, torch->tensor_type)) return from_torch(name, object, *torch);
  }
  static const nb::handle view_type =
      nb::object(nb::module_::import_("fusedmoe.config").attr("TensorView")).release();
  if (object.type().is(view_type)) {
    const auto dtype = to_text(object.attr("dtype"));
    const ElementName* entry = find_element(dtype);
    Array array = to_array(name, object.attr("data"), access);
    if (entry == nullptr || entry->bytes != array.element_bytes) {
      refuse(std::string(name) + ".dtype", "a dtype as wide as the elements of data", dtype,
             "bf16 and f16 take uint16, fp8 and e8m0 uint8");
    }
    array.element = entry->element;
    return array;
  }
  std::optional<Array> array = access == Access::write
                                   ? from_ndarray<nb::ndarray<>>(name, object)
                                   : from_ndarray<nb::ndarray<nb::ro>>(name, object);
  if (array) return *std::move(array);
  array = from_extension_type(name, object, access);
  if (array) return *std::move(array);
  refuse(name,
         access == Access::write ? "a writable array or tensor"
                                 : "a NumPy array, a torch tensor or an object with __dlpack__",
         to_text(object.type().attr("__name__")), "pass one, or a fusedmoe.TensorView of its bits");
}

MatrixView to_matrix(const char* name, const Array& array) {
  const auto dtype = [&]() -> DType {
    switch (array.element) {
      case Element::f32:
        return DType::f32;
      case Element::f16:
        return DType::f16;
      case Element::bf16:
        return DType::bf16;
      case Element::i32:
        return DType::i32;
      case Element::i64:
        return DType::i64;
      case Element::f64:
        return DType::f64;
      case Element::i8:
        return DType::i8;
      case Element::i16:
        return DType::i16;
      case Element::u8:
        return DType::u8;
      default:
        refuse(name, "a floating-point or integer dtype", array.text(), "cast it");
    }
  }();
  if (array.num_dims != 2) refuse(name, "2 dimensions", array.text(), "reshape it");
  const std::int64_t rows = array.shape[0];
  const std::int64_t columns = array.shape[1];
  if (columns > 1 && rows > 0 && array.stride[1] != 1) {
    refuse(name, "a contiguous last dimension",
           array.text() + " with stride " + std::to_string(array.stride[1]), "pass .contiguous()");
  }
  // The stride of a single row says nothing, and frameworks put anything there.
  const std::int64_t stride = rows > 1 ? array.stride[0] : columns;
  return {array.data, dtype, rows, columns, stride};
}

MatrixView to_row(const char* name, const Array& array) {
  if (array.num_dims != 1) refuse(name, "1 dimension", array.text(), "reshape it");
  Array row = array;
  row.num_dims = 2;
  row.shape = {1, array.shape[0]};
  row.stride = {array.shape[0], array.stride[0]};
  return to_matrix(name, row);
}

void check_on_cpu(const char* name, const Array& array) {
  if (array.device.empty()) return;
  refuse(name, "memory of the CPU", array.text(), "move it");
}

std::span<std::byte> to_bytes(const char* name, const Array& array) {
  check_on_cpu(name, array);
  if (!array.contiguous()) {
    refuse(name, "contiguous memory", array.text() + " with gaps", "pass .contiguous()");
  }
  return {static_cast<std::byte*>(array.data),
          static_cast<std::size_t>(array.size() * array.element_bytes)};
}

}  // namespace fusedmoe::python
