// `fusedmoe info`: what this build and this machine offer, and why something is missing.
#include "info.h"

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <memory>

#include "cpu_facts.h"
#include "fusedmoe/fused_moe.h"
#include "fusedmoe/version.h"
#include "report.h"
#include "text.h"

namespace fusedmoe::tool {
namespace {

// What keeps the chosen instruction set where it is.
std::string isa_reason(const std::vector<IsaInfo>& isas, const std::string& chosen) {
  const char* environment = std::getenv("FUSEDMOE_ISA");
  const bool limited = environment != nullptr && environment[0] != '\0';
  std::string best;
  for (const IsaInfo& isa : isas) {
    if (isa.available) best = isa.name;
  }
  if (best == chosen) return "the machine's best";
  return limited ? std::string("limited by FUSEDMOE_ISA=") + environment : "limited";
}

}  // namespace

nlohmann::ordered_json machine_facts() {
  nlohmann::ordered_json row;
  const std::vector<IsaInfo> isas = cpu_isas();
  row["version"] = version();
  row["cpu"] = cpu_model();
  row["isa"] = cpu_isa_name("");
  row["isa_reason"] = isa_reason(isas, row["isa"]);
  row["instruction_sets"] = nlohmann::ordered_json::array();
  for (const IsaInfo& isa : isas) {
    row["instruction_sets"].push_back({{"name", isa.name}, {"available", isa.available}});
  }
  row["threads"] = cpu_threads();
  row["threads_reason"] = cpu_threads_reason();
  row["caches"] = nlohmann::ordered_json::array();
  for (const CpuCache& cache : cpu_caches()) {
    row["caches"].push_back({{"level", cache.level},
                             {"type", cache.type},
                             {"bytes", cache.bytes},
                             {"shared_by", cache.shared_by}});
  }
  row["devices"] = nlohmann::ordered_json::array();
  for (const DeviceInfo& device : list_devices()) {
    row["devices"].push_back(
        {{"name", device.name}, {"available", device.available}, {"reason", device.reason}});
  }
  return row;
}

namespace {

void print(const nlohmann::ordered_json& row) {
  const auto text = [](const nlohmann::ordered_json& value) { return value.get<std::string>(); };
  fmt::print("version           {}\n", text(row["version"]));
  fmt::print("cpu               {}\n", text(row["cpu"]));
  std::string sets;
  for (const auto& isa : row["instruction_sets"]) {
    sets += (sets.empty() ? "" : ", ") + text(isa["name"]) +
            (isa["available"].get<bool>() ? "" : " (not on this machine)");
  }
  fmt::print("instruction sets  {}; chosen: {} ({})\n", sets.empty() ? "none" : sets,
             text(row["isa"]), text(row["isa_reason"]));
  fmt::print("threads           {} ({})\n", row["threads"].get<int>(), text(row["threads_reason"]));
  const char* label = "caches";
  for (const auto& cache : row["caches"]) {
    const int shared = cache["shared_by"].get<int>();
    fmt::print(
        "{:<17} L{} {:<11} {}{}\n", label, cache["level"].get<int>(), text(cache["type"]),
        bytes_text(cache["bytes"].get<std::int64_t>()),
        shared > 0 ? fmt::format(", shared by {} CPU{}", shared, shared == 1 ? "" : "s") : "");
    label = "";
  }
  label = "devices";
  for (const auto& device : row["devices"]) {
    fmt::print("{:<17} {:<5} {:<13} {}\n", label, text(device["name"]),
               device["available"].get<bool>() ? "available" : "not available",
               text(device["reason"]));
    label = "";
  }
}

}  // namespace

void add_info(CLI::App& app, Verb& verb) {
  CLI::App* info = app.add_subcommand(
      "info", "Version, CPU, instruction sets, threads and caches; devices and why one is missing");
  info->footer("Example: FUSEDMOE_ISA=scalar fusedmoe info --json");
  const auto options = std::make_shared<ReportOptions>();
  add_report_options(*info, *options);
  info->callback([options, &verb] {
    verb.run = [options] {
      Report report(*options);
      const nlohmann::ordered_json row = machine_facts();
      report.row(row);
      if (report.table()) print(row);
      return kExitFine;
    };
  });
}

}  // namespace fusedmoe::tool
