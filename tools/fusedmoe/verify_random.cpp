#include "verify_random.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "cpu_facts.h"
#include "progress.h"
#include "random_case.h"

namespace fusedmoe::tool {
namespace {

// Case 0 has the seed itself, so that `--random 1 --seed S` repeats the case with seed S. The
// others' fit into 48 bits: exact in any reader of JSON.
std::uint64_t case_seed(std::uint64_t seed, std::int64_t index) {
  if (index == 0) return seed;
  std::uint64_t z = seed + static_cast<std::uint64_t>(index) * 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;  // splitmix64
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return (z ^ (z >> 31)) >> 16;
}

// --- The line that repeats a case, also when it crashes -----------------------------------------

constexpr std::array kCrashes = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
std::array<struct sigaction, kCrashes.size()> previous_actions;
char crash_text[512];
std::size_t crash_length = 0;

void on_crash(int signal) {
  (void)!write(STDERR_FILENO, crash_text, crash_length);
  // Back to what was there before: the faulting instruction runs again and ends the process.
  for (std::size_t i = 0; i < kCrashes.size(); ++i) {
    if (kCrashes[i] == signal) sigaction(signal, &previous_actions[i], nullptr);
  }
}

class CrashReporter {
 public:
  CrashReporter() {
    struct sigaction action = {};
    action.sa_handler = &on_crash;
    for (std::size_t i = 0; i < kCrashes.size(); ++i) {
      sigaction(kCrashes[i], &action, &previous_actions[i]);
    }
  }
  ~CrashReporter() {
    for (std::size_t i = 0; i < kCrashes.size(); ++i) {
      sigaction(kCrashes[i], &previous_actions[i], nullptr);
    }
  }
  CrashReporter(const CrashReporter&) = delete;
  CrashReporter& operator=(const CrashReporter&) = delete;

  void set(const std::string& repeat) {
    const std::string text = "\nfusedmoe: crashed; repeat: " + repeat + "\n";
    crash_length = 0;
    // copy, not memcpy: the handler writes crash_length bytes, no terminator is due
    const std::size_t length = std::min(text.size(), sizeof(crash_text));
    std::copy_n(text.data(), length, crash_text);
    crash_length = length;
  }
};

std::string repeat_line(const RandomVerifyOptions& options, std::uint64_t seed) {
  const char* isa = std::getenv("FUSEDMOE_ISA");
  std::string line;
  if (isa != nullptr && isa[0] != '\0') line += std::string("FUSEDMOE_ISA=") + isa + " ";
  line += fmt::format("fusedmoe verify --random 1 --seed {}", seed);
  if (options.device.device != "cpu") line += " --device " + options.device.device;
  if (!options.device.isa.empty()) line += " --isa " + options.device.isa;
  if (options.device.threads > 0) line += fmt::format(" --threads {}", options.device.threads);
  return line;
}

// --- How often each value was drawn -------------------------------------------------------------

class Coverage {
 public:
  void add(const RandomCase& drawn) {
    for (const auto& [dimension, value] : tags(drawn)) {
      if (!counts_.contains(dimension)) order_.push_back(dimension);
      ++counts_[dimension][value];
    }
  }
  void print() const {
    for (const std::string& dimension : order_) {
      std::string line;
      for (const auto& [value, count] : counts_.at(dimension)) {
        line += fmt::format("{}{} {}", line.empty() ? "" : ", ", value, count);
      }
      fmt::print("{:<18} {}\n", dimension, line);
    }
  }

 private:
  // Numbers by their size, then names.
  struct ByNumber {
    bool operator()(const std::string& a, const std::string& b) const {
      const bool digits[2] = {std::isdigit(a[0]) != 0, std::isdigit(b[0]) != 0};
      if (digits[0] && digits[1]) return std::atoll(a.c_str()) < std::atoll(b.c_str());
      return digits[0] != digits[1] ? digits[0] : a < b;
    }
  };
  std::vector<std::string> order_;
  std::map<std::string, std::map<std::string, std::int64_t, ByNumber>> counts_;
};

// --- One case -----------------------------------------------------------------------------------

std::vector<std::string> isas_to_draw(const DeviceOptions& options) {
  if (!options.isa.empty()) return {options.isa};
  std::vector<std::string> names;
  for (const IsaInfo& isa : cpu_isas()) {
    if (isa.available) names.push_back(isa.name);
  }
  return names;
}

nlohmann::ordered_json row_of(const RandomCase& drawn, const CaseResult& result, std::int64_t index,
                              const std::string& isa, const std::string& repeat) {
  const WeightFormat formats[2] = {drawn.weights.w13_format, drawn.weights.w2_format};
  nlohmann::ordered_json row = {
      {"path", "random"},
      {"layer", index},
      {"family", "random"},
      {"format", formats[0] == formats[1]
                     ? std::string(to_string(formats[0]))
                     : std::string(to_string(formats[0])) + "+" + to_string(formats[1])},
      {"device", to_string(drawn.device)},
      {"isa", isa},
      {"threads", drawn.runs[0].threads},
      {"num_tokens", drawn.input.num_tokens},
      {"source", "oracle"},
      {"rel_l2", result.errors.rel_l2},
      {"max_error", result.errors.max_error},
      {"tolerance", result.limit.rel_l2},
      {"max_error_tolerance", result.limit.max_error},
      {"pass", result.pass()},
      {"seed", drawn.seed},
      {"case", describe(drawn)},
      {"repeat", repeat}};
  if (!result.pass()) row["problem"] = result.problem;
  return row;
}

}  // namespace

int verify_random(const RandomVerifyOptions& options, Report& report) {
  PlanOptions plan = plan_options(options.device);
  const std::vector<std::string> isas = isas_to_draw(options.device);
  const auto start = std::chrono::steady_clock::now();
  Coverage coverage;
  std::int64_t failures = 0;
  {
    CrashReporter crash_reporter;
    Progress progress("verify: random layer", options.cases);
    for (std::int64_t i = 0; i < options.cases; ++i) {
      const std::uint64_t seed = case_seed(options.seed, i);
      const std::string repeat = repeat_line(options, seed);
      crash_reporter.set(repeat);
      RandomCase drawn = draw_case(seed, SizeLimits{}, isas);
      drawn.device = plan.device;
      if (options.device.threads > 0) drawn.runs[0].threads = options.device.threads;
      const CaseResult result = run_case(drawn);
      coverage.add(drawn);
      plan.isa = drawn.isa;
      report.row(row_of(drawn, result, i, chosen_isa(plan), repeat));
      if (!result.pass()) {
        ++failures;
        progress.erase();
        std::fflush(stdout);
        fmt::print(stderr, "fusedmoe: random layer {}: {}\n  {}\n  repeat: {}\n", i, result.problem,
                   describe(drawn), repeat);
      }
      progress.step();
    }
  }
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
  if (report.table()) {
    coverage.print();
    fmt::print(
        "{} random layer{} verified, {}, {:.0f} ms each\n", options.cases,
        options.cases == 1 ? "" : "s",
        failures == 0 ? "all within tolerance and bit-equal" : fmt::format("{} failed", failures),
        time.count() / static_cast<double>(options.cases));
  }
  return failures == 0 ? kExitFine : kExitMismatch;
}

}  // namespace fusedmoe::tool
