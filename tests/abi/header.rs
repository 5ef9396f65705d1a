//! The header alone: every standard, every compiler, every initialiser.

use std::fmt::Write;
use std::fs;
use std::process::Command;

use crate::compile::{GCC, compile, compilers, header_code, library_dir, output, scratch};

const C_STANDARDS: [&str; 3] = ["-std=c99", "-std=c11", "-std=c17"];
const CXX_STANDARDS: [&str; 4] = ["-std=c++11", "-std=c++14", "-std=c++17", "-std=c++20"];

/// The names of the header's initialisers.
fn initialisers() -> Vec<String> {
    let code = header_code();
    let names: Vec<String> = code
        .split("#define ")
        .skip(1)
        .filter_map(|define| define.split_whitespace().next())
        .filter(|name| name.ends_with("_INIT") || *name == "EP_TENSOR_NONE")
        .map(str::to_string)
        .collect();
    assert!(names.len() > 10, "found {} initialisers in ep.h", names.len());
    names
}

/// A program that includes the header twice, uses each initialiser, and checks that it sets
/// `struct_size` and nothing else.
fn program_with_every_initialiser() -> String {
    let mut text = String::from("#include \"ep.h\"\n#include \"ep.h\"\n#include <string.h>\n\n");
    text.push_str(
        "static int check(const void *object, size_t bytes, size_t from)\n{\n    \
         const unsigned char *at = (const unsigned char *)object;\n    uint32_t size = 0;\n    \
         if (from != 0) memcpy(&size, at, sizeof size);\n    if (from != 0 && size != bytes) return 1;\n    \
         for (size_t i = from; i < bytes; i++) if (at[i] != 0) return 1;\n    return 0;\n}\n\n\
         int main(void)\n{\n    int line = 0;\n",
    );
    for name in initialisers() {
        let (struct_name, from) = match name.as_str() {
            "EP_TENSOR_NONE" => ("ep_tensor_t".to_string(), "0"),
            _ => (name.to_lowercase().replace("_init", "_t"), "sizeof(uint32_t)"),
        };
        writeln!(
            text,
            "    {{ const {struct_name} x = {name}; if (check(&x, sizeof x, {from})) line = __LINE__; }}"
        )
        .expect("strings grow");
    }
    text.push_str("    return line != 0;\n}\n");
    text
}

#[test]
fn it_compiles_alone_under_every_standard() {
    let dir = scratch("alone");
    let (c, cxx) = (dir.join("alone.c"), dir.join("alone.cpp"));
    let text = "#include \"ep.h\"\n#include \"ep.h\"\nint unused;\n";
    fs::write(&c, text).unwrap();
    fs::write(&cxx, text).unwrap();
    for compiler in compilers() {
        for standard in C_STANDARDS {
            compile(compiler.c, &[standard, "-fsyntax-only"], &[&c])
                .unwrap_or_else(|error| panic!("{error}"));
        }
        for standard in CXX_STANDARDS {
            let args = [standard, "-fsyntax-only"];
            compile(compiler.cxx, &args, &[&cxx]).unwrap_or_else(|error| panic!("{error}"));
            let args = [standard, "-fsyntax-only", "-DEP_STATIC"];
            compile(compiler.cxx, &args, &[&cxx]).unwrap_or_else(|error| panic!("{error}"));
        }
    }
}

#[test]
fn every_initialiser_sets_the_size_and_nothing_else() {
    let dir = scratch("initialisers");
    let library = library_dir("initialisers");
    let (c, cxx) = (dir.join("init.c"), dir.join("init.cpp"));
    fs::write(&c, program_with_every_initialiser()).unwrap();
    fs::write(&cxx, program_with_every_initialiser()).unwrap();
    let link = format!("-L{}", library.display());
    for compiler in compilers() {
        let c_runs = C_STANDARDS.map(|standard| (compiler.c, standard, &c));
        let cxx_runs = CXX_STANDARDS.map(|standard| (compiler.cxx, standard, &cxx));
        for (program, standard, source) in c_runs.into_iter().chain(cxx_runs) {
            let built = dir.join("init");
            let args = [standard, "-o", built.to_str().unwrap(), &link, "-lep"];
            compile(program, &args, &[source]).unwrap_or_else(|error| panic!("{error}"));
            output(Command::new(&built).env("LD_LIBRARY_PATH", &library));
        }
    }
}

#[test]
fn two_cxx_units_link_into_one_program() {
    let dir = scratch("two-units");
    let library = library_dir("two-units");
    let unit = |body: &str| format!("#include \"ep.h\"\n{body}\n");
    let (one, two) = (dir.join("one.cpp"), dir.join("two.cpp"));
    let other = "int other() { ep_group_t *g = NULL; return ep_group_create(NULL, NULL, &g); }";
    fs::write(&one, unit(other)).unwrap();
    let main = "int other();\nint main() { ep_group_t *g = NULL;\n    \
                return other() == ep_group_create(NULL, NULL, &g) && g == NULL \
                && ep_version() == EP_VERSION_NUMBER ? 0 : 1; }";
    fs::write(&two, unit(main)).unwrap();
    let (program, link) = (dir.join("program"), format!("-L{}", library.display()));
    let args = ["-std=c++11", "-o", program.to_str().unwrap(), &link, "-lep"];
    compile(GCC.cxx, &args, &[&one, &two]).unwrap_or_else(|error| panic!("{error}"));
    output(Command::new(&program).env("LD_LIBRARY_PATH", &library));
}
