// The verbs of the command `fusedmoe`: each add_* function registers one with its flags and help.
// A verb's callback only fills verb.run, main() runs it; reports are in report.h, progress in
// progress.h.
#pragma once

#include <functional>
#include <string>

namespace CLI {
class App;
}

namespace fusedmoe::tool {

// Exit codes of the command.
inline constexpr int kExitFine = 0;
inline constexpr int kExitMismatch = 1;
inline constexpr int kExitInput = 2;
inline constexpr int kExitNoDevice = 3;

struct ReportOptions {
  bool json = false;
  std::string json_file;
};

// --json and --json-file FILE on a verb. `options` must outlive parsing.
void add_report_options(CLI::App& app, ReportOptions& options);

// The verb that the command line chose; empty until a verb's callback sets it.
struct Verb {
  std::function<int()> run;  // returns the exit code
};

// Each adds a subcommand to `app`. `verb` must outlive parsing.
void add_info(CLI::App& app, Verb& verb);
void add_inspect(CLI::App& app, Verb& verb);
void add_verify(CLI::App& app, Verb& verb);
void add_bench(CLI::App& app, Verb& verb);

}  // namespace fusedmoe::tool
