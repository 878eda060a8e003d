// The command `fusedmoe`: picks the verb, runs it, turns errors into messages and exit codes.
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>

#include "device_option.h"
#include "fusedmoe/error.h"
#include "fusedmoe/version.h"
#include "verbs.h"

namespace fusedmoe::tool {
namespace {

constexpr char kFooter[] =
    "Examples:\n"
    "  fusedmoe info\n"
    "  fusedmoe inspect path/to/checkpoint\n"
    "  fusedmoe verify path/to/checkpoint --tokens 64\n"
    "  fusedmoe verify --random 1000 --seed 1\n"
    "\n"
    "`fusedmoe VERB --help` says more about each verb.\n"
    "Exit codes: 0 fine, 1 mismatch, 2 usage or input, 3 device not available.";

// A descriptor that is closed would be taken by the next file that opens.
void open_standard_descriptors() {
  int opened = 0;
  while (opened >= 0 && opened <= STDERR_FILENO) opened = open("/dev/null", O_RDWR);
  if (opened > STDERR_FILENO) close(opened);
}

int message(int code, const char* text) {
  std::fflush(stdout);  // what was printed comes before the message
  std::fprintf(stderr, "fusedmoe: %s\n", text);
  return code;
}

int parse_and_run(int argc, char** argv) {
  CLI::App app("Fused mixture-of-experts layers: tells, checks and measures.", "fusedmoe");
  app.set_version_flag("--version", std::string("fusedmoe ") + version());
  app.require_subcommand(1);
  app.footer(kFooter);
  Verb verb;
  add_info(app, verb);
  add_inspect(app, verb);
  add_verify(app, verb);
  add_bench(app, verb);
  try {
    app.parse(argc, argv);
    return verb.run ? verb.run() : kExitFine;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    std::string text = error.what();
    const auto chosen = app.get_subcommands();
    text +=
        "; see `fusedmoe " + (chosen.empty() ? "" : chosen.front()->get_name() + " ") + "--help`";
    return message(kExitInput, text.c_str());
  }
}

int run(int argc, char** argv) {
  try {
    return parse_and_run(argc, argv);
  } catch (const DeviceNotAvailable& error) {
    return message(kExitNoDevice, error.what());
  } catch (const Error& error) {
    return message(error.code() == ErrorCode::device ? kExitNoDevice : kExitInput, error.what());
  } catch (const std::exception& error) {
    return message(kExitInput, error.what());
  }
}

}  // namespace
}  // namespace fusedmoe::tool

int main(int argc, char** argv) {
  // A reader that leaves ends the command quietly, whatever was inherited.
  std::signal(SIGPIPE, SIG_DFL);
  fusedmoe::tool::open_standard_descriptors();
  const int code = fusedmoe::tool::run(argc, argv);
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    if (errno == EPIPE) return code;
    std::fprintf(stderr, "fusedmoe: stdout: %s\n", std::strerror(errno));
    return fusedmoe::tool::kExitInput;
  }
  return code;
}
