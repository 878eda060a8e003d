// Cases of other readers' faults (tests/cases/README.md) on quantised checkpoints, and values of
// layouts that no golden has.
#include <gtest/gtest.h>

#include "formats/small_floats.h"
#include "quantised_files.h"

namespace fusedmoe::checkpoint {
namespace {

constexpr char kFp8Block[] = R"({"quant_method":"fp8","weight_block_size":[128,128]})";

double e4m3_at(const std::string& bytes, std::int64_t index) {
  return static_cast<double>(e4m3_to_f32(static_cast<std::uint8_t>(bytes[index])));
}
float f32_at(const std::string& bytes, std::int64_t index) {
  float value = 0;
  std::memcpy(&value, bytes.data() + 4 * index, 4);
  return value;
}

std::int64_t blocks(std::int64_t size) { return (size + 127) / 128; }

MatrixWriter fp8_block_writer() {
  return [](const std::string& stem, std::int64_t n, std::int64_t k) {
    return std::vector<NewTensor>{{stem + ".weight", {n, k}, "F8_E4M3", fp8_bytes(n * k, 11)},
                                  {stem + ".weight_scale_inv",
                                   {blocks(n), blocks(k)},
                                   "F32",
                                   f32_bytes(blocks(n) * blocks(k), 0.5F, 0.25F)}};
  };
}

// The block is the config's, although 1000 / 8 would be 125.
TEST(Cases_CK, B164_TheBlockIsTheConfigs) {
  const Sizes sizes{.hidden = 1000, .intermediate = 512, .experts = 1};
  const QuantisedFiles files(qwen_config(sizes, kFp8Block),
                             qwen_tensors(sizes, fp8_block_writer()));
  const Checkpoint checkpoint = files.open();
  const ExpertWeights expert = checkpoint.layers().front().weights.source(0);
  EXPECT_EQ(expert.w2.scales.block_n, 128);
  const std::string codes = fp8_bytes(1000 * 512, 11);
  const std::string scales = f32_bytes(8 * 4, 0.5F, 0.25F);
  for (const std::int64_t n : {0, 124, 125, 127, 128, 895, 896, 999}) {
    for (const std::int64_t k : {0, 127, 128, 511}) {
      ASSERT_EQ(
          value_at(expert.w2, n, k),
          e4m3_at(codes, n * 512 + k) * static_cast<double>(f32_at(scales, n / 128 * 4 + k / 128)))
          << n << ", " << k;
    }
  }
  std::vector<NewTensor> tensors = qwen_tensors(sizes, fp8_block_writer());
  tensor_named(tensors, "down_proj.weight_scale_inv") = {
      kQwenBlock + "experts.0.down_proj.weight_scale_inv", {8, 5}, "F32"};
  QuantisedFiles(qwen_config(sizes, kFp8Block), tensors)
      .expect_refused(ErrorCode::io, {"down_proj.weight_scale_inv", "[8, 5]", "[8, 4]"});
}

// Gate and up in one tensor, stored [E, H, 2I]: values once transposed, not twice, with their
// scales.
TEST(Cases_CK, B162_FusedAndTransposedFp8WithBlockScales) {
  const std::int64_t h = 768;
  const std::int64_t i = 256;
  const std::string block = "language_model.model.layers.0.feed_forward.";
  const std::string w13 = fp8_bytes(2 * h * 2 * i, 21);
  const std::string s13 = f32_bytes(2 * 6 * 4, 1.0F, 0.5F);
  const std::string w2 = fp8_bytes(2 * i * h, 22);
  const std::string s2 = f32_bytes(2 * 2 * 6, 2.0F, 0.5F);
  const QuantisedFiles files(
      R"({"model_type":"llama4","text_config":{"hidden_size":768,"intermediate_size":256,
          "num_local_experts":2,"num_experts_per_tok":1,"num_hidden_layers":1,"hidden_act":"silu",
          "moe_layers":[0],"dtype":"bfloat16"},"quantization_config":)" +
          std::string(kFp8Block) + "}",
      {{block + "experts.gate_up_proj", {2, h, 2 * i}, "F8_E4M3", w13},
       {block + "experts.gate_up_proj_scale_inv", {2, 6, 4}, "F32", s13},
       {block + "experts.down_proj", {2, i, h}, "F8_E4M3", w2},
       {block + "experts.down_proj_scale_inv", {2, 2, 6}, "F32", s2},
       {block + "router.weight", {2, h}}});
  const Checkpoint checkpoint = files.open();
  const MoeLayer& layer = checkpoint.layers().front();
  ASSERT_FALSE(layer.weights.source);  // whole stacks, in place
  for (std::int64_t e = 0; e < 2; ++e) {
    for (const std::int64_t n : {0, 127, 128, 255, 256, 511}) {
      for (const std::int64_t k : {0, 127, 128, 767}) {
        ASSERT_EQ(value_at(layer.weights.w13, n, k, e),
                  e4m3_at(w13, (e * h + k) * 2 * i + n) *
                      static_cast<double>(f32_at(s13, (e * 6 + k / 128) * 4 + n / 128)));
      }
    }
    for (const std::int64_t n : {0, 500, 767}) {
      for (const std::int64_t k : {0, 128, 255}) {
        ASSERT_EQ(value_at(layer.weights.w2, n, k, e),
                  e4m3_at(w2, (e * i + k) * h + n) *
                      static_cast<double>(f32_at(s2, (e * 2 + k / 128) * 6 + n / 128)));
      }
    }
  }
}

// Gate and up in one tensor have blocks of their own, also where I is no multiple of a block.
TEST(Cases_F8, B042_BlocksOfGateAndUpInOneTensor) {
  const std::int64_t h = 256;
  const std::int64_t i = 192;
  const std::string block = "model.language_model.layers.0.mlp.";
  const auto files = [&](std::int64_t scale_rows) {
    return QuantisedFiles(
        R"({"model_type":"qwen3_5_moe","text_config":{"hidden_size":256,"num_experts":1,
            "moe_intermediate_size":192,"num_experts_per_tok":1,"num_hidden_layers":1,
            "hidden_act":"silu","dtype":"bfloat16"},"quantization_config":)" +
            std::string(kFp8Block) + "}",
        {{block + "experts.gate_up_proj", {1, 2 * i, h}, "F8_E4M3", fp8_bytes(2 * i * h, 31)},
         {block + "experts.gate_up_proj_scale_inv",
          {1, scale_rows, 2},
          "F32",
          f32_bytes(scale_rows * 2, 1.0F, 1.0F)},
         {block + "experts.down_proj", {1, h, i}, "F8_E4M3", fp8_bytes(h * i, 32)},
         {block + "experts.down_proj_scale_inv", {1, 2, 2}, "F32", f32_bytes(4, 1.0F, 1.0F)},
         {block + "gate.weight", {1, h}}});
  };
  const QuantisedFiles right = files(4);
  const Checkpoint checkpoint = right.open();
  const WeightTensor& w13 = checkpoint.layers().front().weights.w13;
  EXPECT_EQ(w13.scales.parts, ScaleParts::halves);
  const std::string codes = fp8_bytes(2 * i * h, 31);
  const std::int64_t rows[][2] = {{0, 0},   {127, 0}, {128, 1}, {191, 1},
                                  {192, 2}, {319, 2}, {320, 3}};
  for (const auto& [n, row] : rows) {
    ASSERT_EQ(value_at(w13, n, 200),
              e4m3_at(codes, n * h + 200) * (2.0 + 2.0 * static_cast<double>(row)))
        << n;
  }
  files(3).expect_refused(ErrorCode::io, {"gate_up_proj_scale_inv", "[1, 3, 2]", "[1, 4, 2]"});
}

std::string compressed_tensors(const std::string& format, const std::string& weights,
                               const std::string& more = "") {
  return R"({"quant_method":"compressed-tensors","format":")" + format +
         R"(","config_groups":{"group_0":{"targets":["Linear"],"weights":{)" + weights + "}}}" +
         more + "}";
}

MatrixWriter ct_int4_writer(std::int64_t group, bool act_order = false) {
  return [=](const std::string& stem, std::int64_t n, std::int64_t k) {
    const std::int64_t groups = group > 0 ? k / group : 1;
    std::vector<NewTensor> tensors = {
        {stem + ".weight_packed", {n, (k + 7) / 8}, "I32", random_bytes(n * ((k + 7) / 8) * 4, 41)},
        {stem + ".weight_scale", {n, groups}, "F32", f32_bytes(n * groups, 0.5F, 0.125F)},
        {stem + ".weight_shape", {2}, "I64", bytes_of<std::int64_t>({n, k})}};
    if (act_order) tensors.push_back({stem + ".weight_g_idx", {k}, "I32"});
    return tensors;
  };
}

// group_size -1: a group is the row.
TEST(Cases_IQ, B156_GroupOfMinusOneIsTheRow) {
  const Sizes sizes{.hidden = 256, .intermediate = 128, .experts = 4};
  for (const char* const weights :
       {R"("num_bits":4,"type":"int","strategy":"group","group_size":-1,"symmetric":true)",
        R"("num_bits":4,"type":"int","strategy":"channel","group_size":-1,"symmetric":true)",
        R"("num_bits":4,"type":"int","strategy":"channel","group_size":null,"symmetric":true)"}) {
    const QuantisedFiles files(qwen_config(sizes, compressed_tensors("pack-quantized", weights)),
                               qwen_tensors(sizes, ct_int4_writer(-1)));
    const Checkpoint checkpoint = files.open();
    const MoeLayer& layer = checkpoint.layers().front();
    EXPECT_EQ(layer.weights.w13.scales.layout, ScaleLayout::channel);
    const ExpertWeights expert = layer.weights.source(3);
    const std::string codes = random_bytes(256 * 128 / 2, 41);
    for (const std::int64_t n : {0, 1, 255}) {
      for (const std::int64_t k : {0, 1, 126, 127}) {
        const auto byte = static_cast<unsigned char>(codes[(n * 128 + k) / 2]);
        const int code = k % 2 == 0 ? byte & 15 : byte >> 4;
        ASSERT_EQ(value_at(expert.w2, n, k), (code - 8) * (0.5 + 0.125 * static_cast<double>(n)));
      }
    }
  }
  const MatrixWriter int8 = [](const std::string& stem, std::int64_t n, std::int64_t k) {
    return std::vector<NewTensor>{
        {stem + ".weight", {n, k}, "I8", random_bytes(n * k, 42)},
        {stem + ".weight_scale", {n, 1}, "F32", f32_bytes(n, 0.5F, 0.125F)}};
  };
  const QuantisedFiles files(
      qwen_config(sizes, compressed_tensors("int-quantized", R"("num_bits":8,"type":"int",
                                            "strategy":"group","group_size":-1)")),
      qwen_tensors(sizes, int8));
  const Checkpoint checkpoint = files.open();
  const ExpertWeights expert = checkpoint.layers().front().weights.source(0);
  EXPECT_EQ(expert.w2.scales.layout, ScaleLayout::channel);
  EXPECT_EQ(value_at(expert.w2, 9, 77),
            static_cast<signed char>(random_bytes(9 * 128 + 78, 42).back()) * (0.5 + 0.125 * 9));
}

struct GptqOptions {
  std::int64_t group = 32;
  bool shuffled = false;
  std::uint32_t zeros = 0x77777777U;
};

MatrixWriter gptq_writer(const GptqOptions& options) {
  return [options](const std::string& stem, std::int64_t n, std::int64_t k) {
    const std::int64_t group = options.group > 0 ? options.group : k;
    std::vector<std::int32_t> indices;
    for (std::int64_t i = 0; i < k; ++i) {
      indices.push_back(static_cast<std::int32_t>((options.shuffled ? k - 1 - i : i) / group));
    }
    const std::vector<std::uint32_t> zeros(k / group * n / 8, options.zeros);
    const std::vector<std::uint16_t> scales(k / group * n, 0x3c00);  // 1
    return std::vector<NewTensor>{
        {stem + ".qweight", {k / 8, n}, "I32", random_bytes(k / 8 * n * 4, 51)},
        {stem + ".qzeros", {k / group, n / 8}, "I32", bytes_of(zeros)},
        {stem + ".scales", {k / group, n}, "F16", bytes_of(scales)},
        {stem + ".g_idx", {k}, "I32", bytes_of(indices)}};
  };
}

TEST(Cases_IQ, B156_GptqToo) {
  const Sizes sizes{.hidden = 64, .intermediate = 32, .experts = 1};
  const QuantisedFiles files(
      qwen_config(sizes, R"({"quant_method":"gptq","bits":4,"group_size":-1,"sym":true})"),
      qwen_tensors(sizes, gptq_writer({.group = -1})));
  const Checkpoint checkpoint = files.open();
  const ExpertWeights expert = checkpoint.layers().front().weights.source(0);
  EXPECT_EQ(expert.w2.scales.layout, ScaleLayout::channel);
  const std::string words = random_bytes(32 / 8 * 64 * 4, 51);
  // k = 13 of output 20: nibble 5 of word [1, 20].
  const auto byte = static_cast<unsigned char>(words[4 * (1 * 64 + 20) + 2]);
  EXPECT_EQ(value_at(expert.w2, 20, 13), (byte >> 4) - 8);
}

// An order of groups by activation is refused, never ignored.
TEST(Cases_IQ, B157_ActOrderIsRefused) {
  const Sizes sizes;
  const std::string config = R"({"quant_method":"gptq","bits":4,"group_size":32,"desc_act":true})";
  // desc_act alone is no harm: what counts is the index.
  EXPECT_EQ(QuantisedFiles(qwen_config(sizes, config), qwen_tensors(sizes, gptq_writer({})))
                .open()
                .layers()
                .size(),
            1U);
  QuantisedFiles(qwen_config(sizes, config), qwen_tensors(sizes, gptq_writer({.shuffled = true})))
      .expect_refused(ErrorCode::unsupported, {"g_idx", "act-order", "model.safetensors"});
  const std::string weights =
      R"("num_bits":4,"type":"int","strategy":"group","group_size":32,"symmetric":true)";
  QuantisedFiles(qwen_config(sizes, compressed_tensors("pack-quantized", weights)),
                 qwen_tensors(sizes, ct_int4_writer(32, true)))
      .expect_refused(ErrorCode::unsupported, {"weight_g_idx", "act-order"});
  for (const char* const order : {R"("group")", R"("dynamic")", "true"}) {
    QuantisedFiles(
        qwen_config(sizes, compressed_tensors("pack-quantized",
                                              weights + std::string(",\"actorder\":") + order)),
        qwen_tensors(sizes, ct_int4_writer(32)))
        .expect_refused(ErrorCode::unsupported, {"actorder", "act-order"});
  }
  for (const char* const order : {R"("weight")", R"("static")", "false", "null"}) {
    EXPECT_NO_THROW(
        QuantisedFiles(
            qwen_config(sizes, compressed_tensors("pack-quantized",
                                                  weights + std::string(",\"actorder\":") + order)),
            qwen_tensors(sizes, ct_int4_writer(32)))
            .open());
  }
}

// gptq stores z - 1, so that 15 is 16 (or 0, to other readers): taken as 16, and said.
TEST(Cases_IQ, StoredZeroPointsOf15) {
  const Sizes sizes;
  const auto open = [&](const std::string& more, std::uint32_t zeros) {
    const QuantisedFiles files(
        qwen_config(sizes, R"({"quant_method":"gptq","bits":4,"group_size":32)" + more + "}"),
        qwen_tensors(sizes, gptq_writer({.zeros = zeros})));
    const Checkpoint checkpoint = files.open();
    const Listing listing = inspect_checkpoint(files.path());
    EXPECT_TRUE(listing.problems.empty());
    const ExpertWeights expert = checkpoint.layers().front().weights.source(1);
    return std::pair(static_cast<const std::uint8_t*>(expert.w2.scales.zero_points)[3],
                     listing.notes);
  };
  const auto [zero, notes] = open(R"(,"sym":false)", 0x7777f777U);
  EXPECT_EQ(zero, 16);
  ASSERT_FALSE(notes.empty());
  EXPECT_NE(notes.front().find("15, read as 16"), std::string::npos) << notes.front();
  EXPECT_EQ(open(R"(,"sym":false)", 0x77773777U).first, 4);
  EXPECT_TRUE(open(R"(,"sym":false)", 0x77773777U).second.empty());
  EXPECT_EQ(open(R"(,"checkpoint_format":"gptq_v2")", 0x7777f777U).first, 15);
  EXPECT_TRUE(open(R"(,"checkpoint_format":"gptq_v2")", 0x7777f777U).second.empty());
}

MatrixWriter ct_mxfp4_writer() {
  return [](const std::string& stem, std::int64_t n, std::int64_t k) {
    return std::vector<NewTensor>{
        {stem + ".weight_packed", {n, k / 2}, "U8", random_bytes(n * k / 2, 61)},
        {stem + ".weight_scale", {n, k / 32}, "U8", std::string(n * k / 32, '\x7e')}};
  };
}

// Writers before 0.14 stored exponents that are 2 too low: told by the tag, and refused.
TEST(Cases_MX, B051_ExponentsWithAnotherBiasAreRefusedByTheWritersTag) {
  const Sizes sizes;
  const auto files = [&](const std::string& version) {
    return QuantisedFiles(
        qwen_config(sizes, compressed_tensors("mxfp4-pack-quantized",
                                              R"("num_bits":4,"type":"float","strategy":"group",
                                                 "group_size":32)",
                                              version)),
        qwen_tensors(sizes, ct_mxfp4_writer()));
  };
  for (const char* const version : {"0.13.0", "0.13.1.a20260110", "0.9.2", "old"}) {
    files(R"(,"version":")" + std::string(version) + "\"")
        .expect_refused(ErrorCode::unsupported, {"version", version, "4 times too small"});
  }
  for (const char* const version : {"0.14.0", "0.14.1", "1.0.0"}) {
    const QuantisedFiles sound = files(R"(,"version":")" + std::string(version) + "\"");
    const Checkpoint checkpoint = sound.open();
    EXPECT_TRUE(inspect_checkpoint(sound.path()).notes.empty());
    const ExpertWeights expert = checkpoint.layers().front().weights.source(0);
    const auto byte = static_cast<unsigned char>(random_bytes(64 * 16, 61)[5 * 16 + 3]);
    EXPECT_EQ(value_at(expert.w2, 5, 7),
              static_cast<double>(e2m1_to_f32(static_cast<std::uint8_t>(byte >> 4))) / 2);
  }
  // Without a tag nothing can be told: read as the format says, with a note.
  const Listing untagged = inspect_checkpoint(files("").path());
  EXPECT_TRUE(untagged.problems.empty());
  ASSERT_FALSE(untagged.notes.empty());
  EXPECT_NE(untagged.notes.front().find("no version"), std::string::npos);
}

// Which of the two orders a file has follows from family and layout, never from its shape: with
// 2I = H and with I = H every order has the same shape.
TEST(Cases_CK, B161_OrderFollowsFromFamilyAndLayout) {
  for (const auto& [h, i] : {std::pair<std::int64_t, std::int64_t>{64, 32}, {64, 64}}) {
    const std::string sizes = R"("hidden_size":64,"intermediate_size":)" + std::to_string(i) +
                              R"(,"num_local_experts":1,"num_experts_per_tok":1,
                                  "num_hidden_layers":1,"hidden_act":"silu","dtype":"bfloat16")";
    const std::string block = "model.layers.0.mlp.";
    const std::vector<NewTensor> beside = {
        {block + "experts.gate_up_proj_bias", {1, 2 * i}},
        {block + "experts.down_proj_bias", {1, h}},
        {block + "router.weight", {1, h}},
        {block + "router.bias", {1}},
    };
    std::vector<NewTensor> plain = beside;
    plain.push_back({block + "experts.gate_up_proj", {1, h, 2 * i}});
    plain.push_back({block + "experts.down_proj", {1, i, h}});
    std::vector<NewTensor> mx = beside;
    mx.push_back({block + "experts.gate_up_proj_blocks", {1, 2 * i, h / 32, 16}, "U8"});
    mx.push_back({block + "experts.gate_up_proj_scales", {1, 2 * i, h / 32}, "U8"});
    mx.push_back({block + "experts.down_proj_blocks", {1, h, i / 32, 16}, "U8"});
    mx.push_back({block + "experts.down_proj_scales", {1, h, i / 32}, "U8"});
    const QuantisedFiles plain_files(R"({"model_type":"gpt_oss",)" + sizes + "}", plain);
    EXPECT_EQ(plain_files.open().layers().front().weights.w13.layout, WeightLayout::kn);
    const std::string quantised =
        R"({"model_type":"gpt_oss",)" + sizes + R"(,"quantization_config":{"quant_method":"mxfp4")";
    const QuantisedFiles mx_files(quantised + "}}", mx);
    EXPECT_EQ(mx_files.open().layers().front().weights.w13.layout, WeightLayout::nk);
    EXPECT_EQ(mx_files.open().layers().front().weights.w13.format, WeightFormat::mxfp4);
    // Unquantised experts under a quantised config: only where exceptions are listed.
    QuantisedFiles(quantised + "}}", plain)
        .expect_refused(ErrorCode::io, {"experts.gate_up_proj'", "unquantised", "no exception"});
    EXPECT_NO_THROW(
        QuantisedFiles(quantised + R"(,"modules_to_not_convert":["model.layers.0.mlp"]}})", plain)
            .open());
  }
}

}  // namespace
}  // namespace fusedmoe::checkpoint
