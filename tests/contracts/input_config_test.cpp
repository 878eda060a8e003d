// Contract 5.3: every field of config, options and weights, wrong in turn. supports() and create()
// give the same reason, which names the argument, what came and what was expected.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "support/layer.h"

namespace fusedmoe::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Request {
  MoeConfig config;
  ExpertWeights weights;
  PlanOptions options;
};

struct Case {
  const char* argument;
  const char* got;
  std::function<void(Request&)> spoil;
  ErrorCode code = ErrorCode::invalid_argument;
};

void expect_refused(const Request& good, const std::vector<Case>& cases) {
  ASSERT_TRUE(FusedMoe::supports(good.config, good.weights, good.options).ok);
  for (const Case& c : cases) {
    SCOPED_TRACE(std::string(c.argument) + " got " + c.got);
    Request bad = good;
    c.spoil(bad);
    const Support support = FusedMoe::supports(bad.config, bad.weights, bad.options);
    EXPECT_FALSE(support.ok);
    const std::string message =
        error_of(c.code, [&] { (void)FusedMoe::create(bad.config, bad.weights, bad.options); });
    EXPECT_EQ(message, support.reason);
    expect_contains(message, {c.argument, "expected ", std::string("got ") + c.got, "; "});
    EXPECT_LT(message.find(c.argument), message.find("expected"));
  }
  EXPECT_NO_THROW((void)FusedMoe::create(good.config, good.weights, good.options));
}

template <class Enum>
Enum bad_enum() {
  return static_cast<Enum>(200);
}

TEST(ContractInput, I1_I5_ConfigFieldsAreRefusedByName) {
  const Layer layer;
  std::vector<Case> cases;
  const std::pair<const char*, std::int64_t MoeConfig::*> sizes[] = {
      {"config.hidden_size", &MoeConfig::hidden_size},
      {"config.intermediate_size", &MoeConfig::intermediate_size},
      {"config.num_experts", &MoeConfig::num_experts},
      {"config.top_k", &MoeConfig::top_k}};
  for (const auto& [name, field] : sizes) {
    for (const auto& [got, value] :
         {std::pair<const char*, std::int64_t>{"0", 0},
          {"-5", -5},
          {"-9223372036854775808", std::numeric_limits<std::int64_t>::min()},
          {"9223372036854775807", std::numeric_limits<std::int64_t>::max()}}) {
      cases.push_back(
          {name, got, [field = field, value = value](Request& r) { r.config.*field = value; }});
    }
  }
  const auto config = [&](const char* name, const char* got, std::function<void(MoeConfig&)> set) {
    cases.push_back({name, got, [set](Request& r) { set(r.config); }});
  };
  config("config.top_k", "8", [](MoeConfig& c) { c.top_k = 8; });
  config("config.dtype", "int32", [](MoeConfig& c) { c.dtype = DType::i32; });
  config("config.dtype", "float64", [](MoeConfig& c) { c.dtype = DType::f64; });
  config("config.dtype", "unknown", [](MoeConfig& c) { c.dtype = bad_enum<DType>(); });
  config("config.output_dtype", "uint8", [](MoeConfig& c) { c.output_dtype = DType::u8; });
  config("config.gate_up_layout", "200",
         [](MoeConfig& c) { c.gate_up_layout = bad_enum<GateUpLayout>(); });
  config("config.gate_up_order", "200",
         [](MoeConfig& c) { c.gate_up_order = bad_enum<GateUpOrder>(); });
  config("config.activation.kind", "200",
         [](MoeConfig& c) { c.activation.kind = bad_enum<Activation>(); });
  for (const auto& [got, value] :
       {std::pair<const char*, float>{"nan", kNan}, {"0.000000", 0.0F}, {"-1.000000", -1.0F}}) {
    for (const Activation kind : {Activation::swigluoai, Activation::swiglustep}) {
      config("config.activation.limit", got, [kind, value = value](MoeConfig& c) {
        c.activation = {.kind = kind, .limit = value};
      });
    }
    config("config.activation.beta", got, [value = value](MoeConfig& c) {
      c.activation = {.kind = Activation::situ, .beta = value};
    });
    config("config.clamp_limit", got, [value = value](MoeConfig& c) { c.clamp_limit = value; });
  }
  config("config.activation.alpha", "nan",
         [](MoeConfig& c) { c.activation = {.kind = Activation::swigluoai, .alpha = kNan}; });
  config("config.activation.beta", "inf",
         [](MoeConfig& c) { c.activation = {.kind = Activation::situ, .beta = kInf}; });
  config("config.activation.linear_beta", "-2.0", [](MoeConfig& c) {
    c.activation = {.kind = Activation::situ, .beta = 1, .linear_beta = -2};
  });
  config("config.clamp_limit", "inf", [](MoeConfig& c) { c.clamp_limit = kInf; });
  config("config.clamp_limit", "activation swigluoai", [](MoeConfig& c) {
    c.activation.kind = Activation::swigluoai;
    c.clamp_limit = 7.0F;
  });
  expect_refused({layer.config, layer.weights.view(), {}}, cases);
}

TEST(ContractInput, I5_OptionsAreRefusedByName) {
  const Layer layer;
  std::vector<Case> cases;
  const auto options = [&](const char* name, const char* got, std::function<void(PlanOptions&)> set,
                           ErrorCode code = ErrorCode::invalid_argument) {
    cases.push_back({name, got, [set](Request& r) { set(r.options); }, code});
  };
  options("options.mode", "200", [](PlanOptions& o) { o.mode = bad_enum<ComputeMode>(); });
  options(
      "options.mode", "a8", [](PlanOptions& o) { o.mode = ComputeMode::a8; },
      ErrorCode::unsupported);
  options("options.isa", "'avx9000'", [](PlanOptions& o) { o.isa = "avx9000"; });
  options("options.max_threads", "-1", [](PlanOptions& o) { o.max_threads = -1; });
  options("options.max_threads", "4097", [](PlanOptions& o) { o.max_threads = 4097; });
  static const ThreadRunner no_function{.num_threads = 2};
  options("options.runner", "a null function", [](PlanOptions& o) { o.runner = &no_function; });
  for (const auto& [got, num_threads] :
       {std::pair<const char*, int>{"0;", 0}, {"-3;", -3}, {"4097;", 4097}}) {
    options("options.runner", got, [num_threads = num_threads](PlanOptions& o) {
      static ThreadRunner runner;
      runner = {[](void*, int, void (*)(void*, int), void*) { FAIL() << "refused, but run"; },
                nullptr, num_threads};
      o.runner = &runner;
    });
  }
  options("options.weight_storage", "200",
          [](PlanOptions& o) { o.weight_storage = bad_enum<WeightStorage>(); });
  options("options.on_stale", "200", [](PlanOptions& o) { o.on_stale = bad_enum<StalePolicy>(); });
  options("options.device.index", "-1", [](PlanOptions& o) { o.device.index = -1; });
  options("options.device.index", "1", [](PlanOptions& o) { o.device.index = 1; });
  options("device.kind", "200", [](PlanOptions& o) { o.device.kind = bad_enum<DeviceKind>(); });
  options("options.device.platform", "'pocl'", [](PlanOptions& o) { o.device.platform = "pocl"; });
  options("expert_map", "2", [](PlanOptions& o) {
    o.expert_map = ExpertMap::explicit_map({0, 1});
  });
  options("expert_map[0]", "7", [](PlanOptions& o) {
    o.expert_map = ExpertMap::explicit_map({7, 0, 1, 2, 3, 4, 5});
  });
  static std::byte room[64];
  options("options.storage", "64 bytes", [](PlanOptions& o) { o.storage = room; });
  options("options.storage", "0", [](PlanOptions& o) { o.weight_storage = WeightStorage::caller; });
  options("options.storage", "64", [](PlanOptions& o) {
    o.weight_storage = WeightStorage::caller;
    o.storage = room;
  });
  expect_refused({layer.config, layer.weights.view(), {}}, cases);
  // packed_weights_size takes the same struct and refuses it with the same text.
  PlanOptions without_function;
  without_function.runner = &no_function;
  EXPECT_EQ(error_of(ErrorCode::invalid_argument,
                     [&] {
                       (void)FusedMoe::packed_weights_size(layer.config, layer.weights.view(),
                                                           without_function);
                     }),
            "options.runner: expected a function and num_threads >= 1, got a null function; fill "
            "both, or pass no runner");
  for (const Device& device : {Device::cuda(), Device::xpu(1)}) {
    const Support support =
        FusedMoe::supports(layer.config, layer.weights.view(), {.device = device});
    const std::string message =
        error_of(ErrorCode::unsupported, [&] { (void)layer.plan({.device = device}); });
    EXPECT_EQ(message, support.reason);
    expect_contains(message, {"device", to_string(device), "not"});
  }
}

TEST(ContractInput, I5_WeightsAreRefusedByName) {
  const Layer layer;
  std::vector<Case> cases;
  struct Tensor {
    std::string name;
    WeightTensor ExpertWeights::*field;
  };
  static const Tensor tensors[] = {{"weights.w13", &ExpertWeights::w13},
                                   {"weights.w2", &ExpertWeights::w2}};
  static std::vector<std::string> names;
  names.reserve(100);
  for (const Tensor& t : tensors) {
    const auto field = t.field;
    const auto add = [&](const std::string& suffix, const char* got,
                         std::function<void(WeightTensor&)> set,
                         ErrorCode code = ErrorCode::invalid_argument) {
      names.push_back(t.name + suffix);
      cases.push_back(
          {names.back().c_str(), got, [set, field](Request& r) { set(r.weights.*field); }, code});
    };
    add("", "[6,", [](WeightTensor& w) { w.experts = 6; });
    add("", "[7,", [](WeightTensor& w) { w.outputs += 1; });
    add("", "[7,", [](WeightTensor& w) { w.inputs -= 1; });
    add("", "[7,", [](WeightTensor& w) { std::swap(w.inputs, w.outputs); });
    add("", "a null pointer", [](WeightTensor& w) { w.data = nullptr; });
    add(".format", "200", [](WeightTensor& w) { w.format = bad_enum<WeightFormat>(); });
    add(".scales.layout", "none", [](WeightTensor& w) { w.format = WeightFormat::nvfp4; });
    const auto int4 = [](WeightTensor& w) -> WeightScales& {
      w.format = WeightFormat::int4;
      w.scales = {.layout = ScaleLayout::group, .group_size = 32};
      return w.scales;
    };
    const auto block = [](WeightTensor& w) -> WeightScales& {
      w.format = WeightFormat::fp8_e4m3;
      w.scales = {.layout = ScaleLayout::block, .block_n = 32, .block_k = 32};
      return w.scales;
    };
    add(".scales.layout", "200",
        [=](WeightTensor& w) { int4(w).layout = bad_enum<ScaleLayout>(); });
    add(".scales.type", "200", [=](WeightTensor& w) { int4(w).type = bad_enum<ScaleType>(); });
    add(".scales.parts", "200", [=](WeightTensor& w) { int4(w).parts = bad_enum<ScaleParts>(); });
    add(".scales.layout", "block", [=](WeightTensor& w) { int4(w).layout = ScaleLayout::block; });
    add(".scales.type", "e8m0", [=](WeightTensor& w) { int4(w).type = ScaleType::e8m0; });
    add(".scales.group_size", "0", [=](WeightTensor& w) { int4(w).group_size = 0; });
    add(".scales.group_size", "-1", [=](WeightTensor& w) { int4(w).group_size = -1; });
    add(".scales.data", "a null pointer", [=](WeightTensor& w) { int4(w); });
    add(".scales.global", "some", [=](WeightTensor& w) {
      static const float one = 1;
      int4(w).data = &one;
      w.scales.global = &one;
    });
    add(".layout", "kn", [=](WeightTensor& w) {
      int4(w);
      w.layout = WeightLayout::kn;
    });
    add(".scales.block_n", "0", [=](WeightTensor& w) { block(w).block_n = 0; });
    add(".scales.block_k", "-3", [=](WeightTensor& w) { block(w).block_k = -3; });
    add(".scales.parts", "", [=](WeightTensor& w) { block(w).parts = ScaleParts::interleaved; });
    add(".scales.zero_points", "some", [=](WeightTensor& w) {
      static const float one = 1;
      block(w).data = &one;
      w.scales.zero_points = &one;
    });
    add("", "", [](WeightTensor& w) { w.format = WeightFormat::q6_k; });
    add(".layout", "200", [](WeightTensor& w) { w.layout = bad_enum<WeightLayout>(); });
    add(".row_stride", "3", [](WeightTensor& w) { w.row_stride = 3; });
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
    add(".row_stride", "9223372036854775807", [](WeightTensor& w) { w.row_stride = kMost; });
    add(".expert_stride", "9223372036854775807", [](WeightTensor& w) { w.expert_stride = kMost; });
    add(".row_stride", "-131", [](WeightTensor& w) { w.row_stride = -131; });
    add(".expert_stride", "100", [](WeightTensor& w) { w.expert_stride = 100; });
    add(".scales", "some", [](WeightTensor& w) { w.scales.layout = ScaleLayout::channel; });
    static const float scale = 1;
    static const std::uint8_t zero = 0;
    add(".scales", "some", [](WeightTensor& w) { w.scales.data = &scale; });
    add(".scales", "some", [](WeightTensor& w) { w.scales.zero_points = &zero; });
    add(".scales", "some", [](WeightTensor& w) { w.scales.global = &scale; });
  }
  const auto weights = [&](const char* name, const char* got,
                           std::function<void(ExpertWeights&)> set) {
    cases.push_back({name, got, [set](Request& r) { set(r.weights); }});
  };
  weights("weights.w13", "[0, 0, 0]", [](ExpertWeights& w) { w = {}; });
  weights("weights.w13", "[7, 154, 131]", [](ExpertWeights& w) { w.w13_up = w.w13; });
  weights("weights.w13_bias", "[7, 77]", [](ExpertWeights& w) { w.w13_bias.size = 77; });
  weights("weights.w13_bias", "[8, 154]", [](ExpertWeights& w) { w.w13_bias.experts = 8; });
  weights("weights.w13_bias", "a null", [](ExpertWeights& w) { w.w13_bias.data = nullptr; });
  weights("weights.w13_bias.dtype", "int8", [](ExpertWeights& w) { w.w13_bias.dtype = DType::i8; });
  weights("weights.w2_bias", "[7, 130]", [](ExpertWeights& w) { w.w2_bias.size = 130; });
  weights("weights.w2_bias.dtype", "int64", [](ExpertWeights& w) { w.w2_bias.dtype = DType::i64; });
  expect_refused({layer.config, layer.weights.view(), {}}, cases);

  // Sizes that are legal one by one but whose product no memory holds: refused, not wrapped.
  const auto huge = [&](Request& r) {
    r.config.hidden_size = r.config.intermediate_size = std::int64_t{1} << 31;
    r.weights.w13.inputs = r.weights.w2.outputs = std::int64_t{1} << 31;
    r.weights.w2.inputs = std::int64_t{1} << 31;
    r.weights.w13.outputs = std::int64_t{1} << 32;
  };
  expect_refused({layer.config, layer.weights.view(), {}},
                 {{"weights.w13", "[7, 4294967296, 2147483648]", huge}});

  // Without a gate there is no place for an up projection of its own.
  MoeConfig plain = layer.config;
  plain.activation.kind = Activation::relu2;
  const Layer relu2(plain);
  expect_refused(
      {plain, relu2.weights.view(), {}},
      {{"weights.w13_up", "a tensor", [](Request& r) { r.weights.w13_up = r.weights.w13; }},
       {"weights.w13", "[7, 154, 131]", [](Request& r) { r.weights.w13.outputs = 154; }}});
  // A source yields views one expert at a time: they are held to the same.
  ExpertWeights source = layer.weights.as_source();
  const auto slice_of = source.source;
  source.source = [slice_of](std::int64_t expert) {
    ExpertWeights one = slice_of(expert);
    if (expert == 4) one.w2.inputs = 76;
    return one;
  };
  expect_contains(
      error_of(ErrorCode::invalid_argument, [&] { (void)FusedMoe::create(layer.config, source); }),
      {"weights.w2", "expected [1, 131, 77]", "got [1, 131, 76]"});
  source.source = [](std::int64_t) { return ExpertWeights{}; };
  expect_contains(
      error_of(ErrorCode::invalid_argument, [&] { (void)FusedMoe::create(layer.config, source); }),
      {"weights.w13", "[0, 0, 0]"});
  source.source = [&](std::int64_t) {  // another source instead of views
    ExpertWeights one = layer.weights.as_source();
    one.w13.experts = one.w2.experts = one.w13_bias.experts = one.w2_bias.experts = 1;
    return one;
  };
  expect_contains(
      error_of(ErrorCode::invalid_argument, [&] { (void)FusedMoe::create(layer.config, source); }),
      {"weights.w13", "a null pointer"});
  EXPECT_FALSE(
      FusedMoe::supports(layer.config, source, {.weight_storage = WeightStorage::borrowed}).ok);
}

}  // namespace
}  // namespace fusedmoe::test
