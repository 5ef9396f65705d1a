//! Compiles `kernels/src/*.cu` ahead of time, a cubin per file and architecture, and embeds them.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `EP_NVCC` | the compiler; else `$CUDA_HOME/bin/nvcc`, `nvcc` on PATH, the wheel under `build/cuda` |
//! | `EP_CUDA_ARCHS` | such as `sm_90a`, or several with commas: fewer architectures, for a quick build |
//! | `EP_REQUIRE_KERNELS` | `1`: a build without kernels is an error |
//!
//! Without nvcc the crate builds, and says that it has no kernels.

use std::collections::hash_map::DefaultHasher;
use std::fmt::Write as _;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::{env, fs};

/// Compute capability 8.x, H100 and H200, B200. The letter a: with what only that architecture has.
const ARCHS: &str = "sm_80,sm_90a,sm_100a";
const FLAGS: [&str; 5] =
    ["-std=c++17", "-O3", "-Xptxas=-v,-warn-spills", "--Werror=cross-execution-space-call", "-cubin"];

/// One compilation: a file for an architecture.
struct Job {
    source: PathBuf,
    arch: String,
    cubin: PathBuf,
}

struct Compiler {
    nvcc: PathBuf,
    include: PathBuf,
    /// CUDA version as the driver counts it: 13000 is 13.0.
    version: u32,
    /// Of the compiler, the flags and all headers.
    key: u64,
}

fn main() {
    for name in ["EP_NVCC", "CUDA_HOME", "PATH", "EP_CUDA_ARCHS", "EP_REQUIRE_KERNELS"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    println!("cargo::rerun-if-changed=build.rs");
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("..");
    let kernels = root.join("kernels");
    for part in ["src", "include"] {
        println!("cargo::rerun-if-changed={}", kernels.join(part).display());
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    match launch_constants(&kernels.join("include/ep/launch.h")) {
        Ok(text) => fs::write(out.join("launch.rs"), text).expect("OUT_DIR is writable"),
        Err(why) => fail(&why),
    }
    let built = build(&root, &kernels, &out);
    let required = env::var("EP_REQUIRE_KERNELS").is_ok_and(|value| value == "1");
    match &built {
        Err(Failure::Broken(why)) => fail(why),
        Err(Failure::Absent(why)) if required => fail(&format!("EP_REQUIRE_KERNELS=1, and {why}")),
        Err(Failure::Absent(why)) => println!("cargo::warning=built without CUDA kernels: {why}"),
        Ok(_) => {}
    }
    fs::write(out.join("kernels.rs"), generated(&built)).expect("OUT_DIR is writable");
}

fn fail(why: &str) {
    for line in why.lines() {
        println!("cargo::error={line}");
    }
}

enum Failure {
    /// Nothing to compile, or nothing to compile it with.
    Absent(String),
    /// The kernels do not compile.
    Broken(String),
}

struct Built {
    version: u32,
    jobs: Vec<Job>,
    report: PathBuf,
}

fn build(root: &Path, kernels: &Path, out: &Path) -> Result<Built, Failure> {
    let sources = files_below(&kernels.join("src"), "cu");
    if sources.is_empty() {
        return Err(Failure::Absent(String::from("kernels/src has no .cu file")));
    }
    let compiler = Compiler::find(root, kernels)?;
    let archs = env::var("EP_CUDA_ARCHS").unwrap_or_default();
    let archs = if archs.is_empty() { ARCHS } else { archs.as_str() };
    let mut jobs = Vec::new();
    for source in &sources {
        for arch in archs.split(',').map(str::trim).filter(|arch| !arch.is_empty()) {
            let stem = source.file_stem().unwrap_or_default().to_string_lossy();
            let cubin = out.join(format!("{stem}.{arch}.cubin"));
            jobs.push(Job { source: source.clone(), arch: arch.to_string(), cubin });
        }
    }
    compile_all(&compiler, &jobs).map_err(Failure::Broken)?;
    let report = out.join("resources.txt");
    let mut text = String::new();
    for job in &jobs {
        let _ = writeln!(text, "# {} {}", stem(&job.source), job.arch);
        text += &fs::read_to_string(job.log()).unwrap_or_default();
    }
    fs::write(&report, text).expect("OUT_DIR is writable");
    Ok(Built { version: compiler.version, jobs, report })
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

fn files_below(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let Ok(entries) = fs::read_dir(dir) else { return found };
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            found.extend(files_below(&path, extension));
        } else if extension.is_empty() || path.extension().is_some_and(|have| have == extension) {
            found.push(path);
        }
    }
    found.sort();
    found
}

impl Compiler {
    fn find(root: &Path, kernels: &Path) -> Result<Compiler, Failure> {
        let nvcc = find_nvcc(root).map_err(Failure::Absent)?;
        let output = Command::new(&nvcc).arg("--version").output();
        let output = output.map_err(|e| Failure::Broken(format!("{}: {e}", nvcc.display())))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let version = parse_version(&text).ok_or_else(|| {
            Failure::Broken(format!("{} --version names no release: {text}", nvcc.display()))
        })?;
        let include = kernels.join("include");
        let mut hasher = DefaultHasher::new();
        (&text, FLAGS).hash(&mut hasher);
        for header in files_below(&include, "").iter().chain(&files_below(&kernels.join("src"), "cuh")) {
            (header, fs::read(header).unwrap_or_default()).hash(&mut hasher);
        }
        Ok(Compiler { nvcc, include, version, key: hasher.finish() })
    }
}

fn find_nvcc(root: &Path) -> Result<PathBuf, String> {
    if let Some(nvcc) = env::var_os("EP_NVCC").filter(|nvcc| !nvcc.is_empty()).map(PathBuf::from) {
        return if nvcc.is_file() {
            Ok(nvcc)
        } else {
            Err(format!("EP_NVCC is {}, which is no file", nvcc.display()))
        };
    }
    let home =
        env::var_os("CUDA_HOME").filter(|home| !home.is_empty()).map(|home| PathBuf::from(home).join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<PathBuf> = home.into_iter().chain(env::split_paths(&path)).collect();
    if let Ok(pythons) = fs::read_dir(root.join("build/cuda/lib")) {
        dirs.extend(pythons.flatten().map(|python| python.path().join("site-packages/nvidia/cu13/bin")));
    }
    dirs.into_iter().map(|dir| dir.join("nvcc")).find(|nvcc| nvcc.is_file()).ok_or_else(|| {
        String::from(
            "there is no nvcc: set CUDA_HOME, or run scripts/cuda.sh, which installs the registry's wheel",
        )
    })
}

/// `release 13.0, V13.0.88` is 13000.
fn parse_version(text: &str) -> Option<u32> {
    let release = text.split("release ").nth(1)?.split(',').next()?;
    let (major, minor) = release.split_once('.')?;
    Some(major.parse::<u32>().ok()? * 1000 + minor.parse::<u32>().ok()? * 10)
}

impl Job {
    /// What ptxas said: registers, spills, shared memory.
    fn log(&self) -> PathBuf {
        self.cubin.with_extension("log")
    }

    fn run(&self, compiler: &Compiler) -> Result<(), String> {
        let mut hasher = DefaultHasher::new();
        (compiler.key, fs::read(&self.source).unwrap_or_default()).hash(&mut hasher);
        let key = format!("{:016x}", hasher.finish());
        let key_file = self.cubin.with_extension("key");
        if self.cubin.is_file() && fs::read_to_string(&key_file).is_ok_and(|have| have == key) {
            return Ok(());
        }
        let code = format!("-gencode=arch={},code={}", self.arch.replace("sm_", "compute_"), self.arch);
        let output = Command::new(&compiler.nvcc)
            .args(FLAGS)
            .arg(code)
            .arg("-I")
            .arg(&compiler.include)
            .arg("-o")
            .arg(&self.cubin)
            .arg(&self.source)
            .output()
            .map_err(|e| format!("{}: {e}", compiler.nvcc.display()))?;
        let said =
            String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            return Err(format!(
                "nvcc could not compile {} for {}:\n{said}",
                self.source.display(),
                self.arch
            ));
        }
        for line in said.lines().filter(|line| line.to_ascii_lowercase().contains("warning")) {
            println!("cargo::warning={} {}: {line}", stem(&self.source), self.arch);
        }
        fs::write(self.log(), said).map_err(|e| e.to_string())?;
        fs::write(key_file, key).map_err(|e| e.to_string())
    }
}

/// Runs the jobs on as many threads as cargo allows, and returns what the first failed one said.
fn compile_all(compiler: &Compiler, jobs: &[Job]) -> Result<(), String> {
    let threads = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse::<usize>().ok()).unwrap_or(1);
    let waiting = Mutex::new(jobs.iter());
    let failed = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, jobs.len()) {
            scope.spawn(|| {
                loop {
                    let next = waiting.lock().expect("no thread panics with it").next();
                    let Some(job) = next else { break };
                    if let Err(why) = job.run(compiler) {
                        failed.lock().expect("no thread panics with it").get_or_insert(why);
                        break;
                    }
                }
            });
        }
    });
    failed.into_inner().expect("no thread panics with it").map_or(Ok(()), Err)
}

/// The source of `ep_cuda::kernels`' tables.
fn generated(built: &Result<Built, Failure>) -> String {
    let mut text = String::new();
    let (version, why, report) = match built {
        Ok(built) => (built.version, "", format!("include_str!({:?})", built.report)),
        Err(Failure::Absent(why) | Failure::Broken(why)) => (0, why.as_str(), String::from("\"\"")),
    };
    let _ = writeln!(text, "pub(crate) const TOOLKIT_VERSION: u32 = {version};");
    let _ = writeln!(text, "pub(crate) const WHY_NONE: &str = {why:?};");
    let _ = writeln!(text, "#[cfg(test)]\npub(crate) const RESOURCES: &str = {report};");
    let jobs = built.as_ref().map_or(&[][..], |built| &built.jobs);
    let _ = writeln!(text, "pub(crate) static IMAGES: [Image; {}] = [", jobs.len());
    for job in jobs {
        let (source, arch) = (stem(&job.source), &job.arch);
        let _ = writeln!(
            text,
            "    Image {{ source: {source:?}, arch: {arch:?}, bytes: &Aligned(*include_bytes!({:?})) }},",
            job.cubin
        );
    }
    text + "];\n"
}

/// The numbers of `launch.h` as Rust constants: `EP_NAME = product,` in its enum. `tests/args.rs` compares
/// them with what the C compiler says.
fn launch_constants(header: &Path) -> Result<String, String> {
    let text = fs::read_to_string(header).map_err(|e| format!("{}: {e}", header.display()))?;
    let mut known: Vec<(&str, usize)> = Vec::new();
    for line in text.lines() {
        let line = line.split("/*").next().unwrap_or_default().trim().trim_end_matches(',');
        let Some((name, product)) = line.split_once(" = ") else { continue };
        let factor = |factor: &str| {
            let factor = factor.trim();
            let named = known.iter().find(|(name, _)| *name == factor).map(|(_, value)| *value);
            named.or_else(|| factor.parse().ok())
        };
        let value = product.split('*').map(factor).try_fold(1, |all, factor| Some(all * factor?));
        let value =
            value.ok_or_else(|| format!("{}: '{line}' is no product of numbers", header.display()))?;
        known.push((name.trim(), value));
    }
    let line = |(name, value): &(&str, usize)| {
        format!(
            "#[allow(dead_code)]\npub(crate) const {}: usize = {value};\n",
            name.trim_start_matches("EP_")
        )
    };
    Ok(known.iter().map(line).collect())
}
