//! The pod of a build: a template, filled with what the message and the configuration say.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::message::Build;
use crate::screwdriver::config::ScrewdriverSource;
use journeyman_domain::limits::OBJECT_NAME_BYTES_MAX;
use journeyman_platform::kubernetes::{Pod, PodTemplate};
use journeyman_platform::settings::values::{Url, merge_json};

const BUILT_IN: &str = include_str!("pod.yaml.jinja");
/// The label by which Screwdriver's own worker finds the pods of a build.
pub(crate) const BUILD_LABEL: &str = "sdbuild";
const CLASSES: [&str; 4] = ["MICRO", "LOW", "HIGH", "TURBO"];
const SUFFIX_CHARS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";

/// The template of the pods of builds.
pub(crate) struct BuildTemplate {
    /// The file that it comes from.
    place: String,
    template: PodTemplate,
}

#[derive(Debug, thiserror::Error)]
#[error("the pod template {place}: {message}")]
pub(crate) struct TemplateError {
    place: String,
    message: String,
}

/// What a template sees.
#[derive(Serialize)]
struct Values<'a, M> {
    name: &'a str,
    /// Of the build's container, and the label by which its pods are found.
    container: &'a str,
    /// That holds the token, as `token`.
    secret: &'a str,
    build_id: u64,
    prefix: &'a str,
    image: &'a str,
    pipeline_id: String,
    labels: BTreeMap<&'static str, String>,
    cpu: String,
    memory: String,
    /// The time limit in minutes.
    timeout: u64,
    /// The grace period in seconds.
    termination_grace: u64,
    api: String,
    ui: String,
    store: String,
    launcher_image: String,
    launcher_version: &'a str,
    node_selectors: BTreeMap<&'a str, String>,
    cache: Option<CacheValues>,
    /// All fields of the message but its token.
    message: M,
}

#[derive(Serialize)]
struct CacheValues {
    read_only: bool,
    pipeline: String,
    job: String,
    event: String,
}

impl BuildTemplate {
    /// Reads the template of an operator, or takes the built-in one.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be read, or is no template.
    pub(crate) fn load(file: Option<&Path>) -> Result<Self, TemplateError> {
        let place = file.map_or_else(|| "that is built in".to_owned(), |file| file.display().to_string());
        let text = file.map_or_else(|| Ok(BUILT_IN.to_owned()), std::fs::read_to_string);
        let template = text.map_err(|error| error.to_string()).and_then(PodTemplate::new);
        match template {
            Ok(template) => Ok(Self { place, template }),
            Err(message) => Err(TemplateError { place, message }),
        }
    }

    /// Fills it in. Name and label are set whatever the template says, because the pod is found by them.
    ///
    /// # Errors
    ///
    /// If it uses a value that does not exist, or does not make a pod with the container of the build.
    pub(crate) fn pod(&self, build: &Build, source: &ScrewdriverSource, launch: u32) -> Result<Value, TemplateError> {
        let name = pod_name(&source.prefix, build.id(), launch);
        let container = build_label(&source.prefix, build.id());
        let failed = |message: String| TemplateError { place: self.place.clone(), message };
        let mut pod = self.template.render(values(build, source, &name, &container)).map_err(failed)?;
        let metadata = json!({ "name": name, "labels": { BUILD_LABEL: container } });
        merge_json(&mut pod, json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata }));
        let Some(containers) = pod["spec"]["containers"].as_array() else {
            return Err(failed("it makes no pod: spec.containers is no list".to_owned()));
        };
        if !containers.iter().any(|one| one["name"] == container.as_str()) {
            return Err(failed("no container has the name {{ container }}".to_owned()));
        }
        Ok(pod)
    }
}

/// The value of [`BUILD_LABEL`].
pub(crate) fn build_label(prefix: &str, build_id: u64) -> String {
    format!("{prefix}{build_id}")
}

/// The same for each attempt to create the pod of a launch, so that there is one.
pub(crate) fn pod_name(prefix: &str, build_id: u64, launch: u32) -> String {
    let hash = Sha256::digest(format!("{build_id}/{launch}"));
    let suffix = hash.iter().take(5).map(|byte| char::from(SUFFIX_CHARS[usize::from(*byte) % SUFFIX_CHARS.len()]));
    format!("{prefix}{build_id}-{}", suffix.collect::<String>())
}

/// Holds the token of a build, for its pod. The cluster deletes it together with the pod.
pub(crate) fn token_secret(pod: &Pod, build: &Build) -> Value {
    let (name, uid) = (&pod.metadata.name, &pod.metadata.uid);
    let owner = json!({ "apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid });
    let metadata = json!({ "name": name, "ownerReferences": [owner] });
    let data = json!({ "token": build.known.token.reveal() });
    json!({ "apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data })
}

fn values<'a>(
    build: &'a Build,
    source: &'a ScrewdriverSource,
    name: &'a str,
    container: &'a str,
) -> Values<'a, impl Serialize> {
    let known = &build.known;
    let cpu = amount(build.annotation("cpu"), &source.cpu, 1000);
    let memory = amount(build.annotation("ram"), &source.memory, 1);
    let disk_speed = build.annotation("diskSpeed").and_then(Value::as_str).filter(|speed| !speed.is_empty());
    let disk_speed = source.disk_speed_label.as_deref().zip(disk_speed.map(str::to_lowercase));
    let selectors = source.node_selectors.iter().map(|(key, value)| (key.as_str(), value.clone()));
    let minutes = |span: std::time::Duration| span.as_secs() / 60;
    let timeout = build.number("timeout").map(|asked| asked.min(minutes(source.build_timeout_max.0)));
    let grace = source.build_termination_grace.0.as_secs();
    Values {
        name,
        container,
        secret: name,
        build_id: build.id(),
        prefix: &source.prefix,
        image: &known.container,
        pipeline_id: id(known.pipeline.id),
        labels: labels(build, container, cpu, memory),
        cpu: format!("{cpu}m"),
        memory: format!("{memory}Gi"),
        timeout: timeout.unwrap_or_else(|| minutes(source.build_timeout.0)),
        termination_grace: build.number("terminationGracePeriodSeconds").map_or(grace, |asked| asked.max(grace)),
        api: shell_safe(Some(source.api.as_ref().unwrap_or(&known.api_uri))),
        ui: shell_safe(source.ui.as_ref()),
        store: shell_safe(source.store.as_ref()),
        launcher_image: format!("{}:{}", source.launcher_image, source.launcher_version),
        launcher_version: &source.launcher_version,
        node_selectors: disk_speed.into_iter().chain(selectors).collect(),
        cache: source.cache_path.as_ref().map(|path| cache(build, &path.0, &source.prefix)),
        message: build.shown(),
    }
}

/// What a build gets by the class, or the number, in an annotation.
fn amount(asked: Option<&Value>, classes: &BTreeMap<String, u32>, unit: u32) -> u32 {
    let class = |name: &str| classes.get(name).copied();
    let number = asked.and_then(Value::as_u64).map(|number| u32::try_from(number).unwrap_or(u32::MAX));
    match number {
        Some(number) => number.saturating_mul(unit).min(class("MAX").unwrap_or(u32::MAX)),
        None => asked.and_then(Value::as_str).and_then(class).or_else(|| class("LOW")).unwrap_or(unit),
    }
}

fn labels(build: &Build, container: &str, cpu: u32, memory: u32) -> BTreeMap<&'static str, String> {
    let known = &build.known;
    let pr_number =
        known.pr_num.as_ref().map(|number| number.as_str().map_or_else(|| number.to_string(), str::to_owned));
    let disk = build.annotation("disk").and_then(Value::as_str).filter(|class| CLASSES.contains(class));
    let all = [
        ("app", Some("screwdriver".to_owned())),
        ("tier", Some("builds".to_owned())),
        (BUILD_LABEL, Some(container.to_owned())),
        ("screwdriver.cd/pipeline", known.pipeline.name.clone()),
        ("screwdriver.cd/job", known.job_name.clone()),
        ("screwdriver.cd/template_name", known.template.full_name.clone()),
        ("screwdriver.cd/template_version", known.template.version.clone()),
        ("screwdriver.cd/pr_number", pr_number.filter(|number| number != "null")),
        ("screwdriver.cd/cpu", Some((f64::from(cpu) / 1000.0).to_string())),
        ("screwdriver.cd/memory", Some(memory.to_string())),
        ("screwdriver.cd/disk", Some(disk.unwrap_or("LOW").to_owned())),
    ];
    all.into_iter().filter_map(|(name, value)| Some((name, label(&value.filter(|value| !value.is_empty())?)))).collect()
}

/// The text as the value of a label: what is not allowed becomes a dot.
fn label(text: &str) -> String {
    let is_allowed = |char: char| char.is_ascii_alphanumeric() || matches!(char, '-' | '_' | '.');
    let mut label = String::new();
    let mut was_replaced = false;
    for char in text.chars() {
        if is_allowed(char) || !was_replaced {
            label.push(if is_allowed(char) { char } else { '.' });
        }
        was_replaced = !is_allowed(char);
    }
    let edge = |char: char| !char.is_ascii_alphanumeric();
    let label = label.trim_matches(edge);
    label[..label.len().min(OBJECT_NAME_BYTES_MAX)].trim_matches(edge).to_owned()
}

/// Builds of pull requests read the caches of the job that they would change, and do not write them.
fn cache(build: &Build, path: &Path, prefix: &str) -> CacheValues {
    let known = &build.known;
    let read_only = known.job_name.as_deref().is_some_and(is_of_pull_request);
    let root: PathBuf = path.join(prefix).components().collect();
    let (root, pipeline) = (root.display(), id(known.pipeline.id));
    let job_id = known.pr_parent_job_id.filter(|_| read_only).or(known.job_id);
    CacheValues {
        read_only,
        pipeline: format!("{root}/pipelines/{pipeline}"),
        job: format!("{root}/jobs/{pipeline}/{}", id(job_id)),
        event: format!("{root}/events/{pipeline}/{}", id(known.event_id)),
    }
}

/// `PR-7` and `PR-7:job`.
fn is_of_pull_request(job_name: &str) -> bool {
    let number = job_name.get(3..).filter(|_| job_name[..3].eq_ignore_ascii_case("PR-"));
    let number = number.map(|rest| rest.split_once(':').map_or(rest, |(number, _)| number));
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

fn id(id: Option<u64>) -> String {
    id.map(|id| id.to_string()).unwrap_or_default()
}

/// A URL in double quotes. Its other characters that a shell interprets there are escaped in each URL.
fn shell_safe(url: Option<&Url>) -> String {
    url.map(|url| url.as_str().replace('$', "%24")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::screwdriver::message::Message;

    fn lines(text: &str) -> impl Iterator<Item = Value> {
        text.lines().map(|line| serde_json::from_str(line).unwrap())
    }

    fn source(keys: Value) -> ScrewdriverSource {
        let mut all = json!({ "api": "http://127.0.0.1:28081", "ui": "http://127.0.0.1:28081", "store": "http://127.0.0.1:28081" });
        all.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        serde_json::from_value(all).unwrap()
    }

    fn build(fields: Value) -> Build {
        let Ok(Message::Start(build)) = Message::from_json(json!({ "job": "start", "buildConfig": fields })) else {
            panic!("a start")
        };
        build
    }

    fn fields() -> Value {
        json!({ "buildId": 7, "container": "scn/a:1", "apiUri": "http://127.0.0.1:28081", "token": "<jwt>", "pipeline": { "id": 1 } })
    }

    fn made(build: &Build, source: &ScrewdriverSource) -> Value {
        BuildTemplate::load(None).unwrap().pod(build, source, 0).unwrap()
    }

    /// Without what is meant to differ: the suffix of the name, and the token's place.
    fn comparable(pod: &Value) -> Value {
        let mut pod = pod.clone();
        let name = pod["metadata"]["name"].as_str().unwrap();
        let (start, suffix) = name.rsplit_once('-').unwrap();
        assert!(suffix.len() == 5 && suffix.bytes().all(|byte| SUFFIX_CHARS.contains(&byte)), "{name}");
        pod["metadata"]["name"] = start.into();
        let container = &mut pod["spec"]["containers"][0];
        let args = container["args"][0].as_str().unwrap();
        container["args"][0] = args.replace("<jwt>", "$SD_TEMPORAL_TOKEN").into();
        container["env"].as_array_mut().unwrap().retain(|variable| variable["name"] != "SD_TEMPORAL_TOKEN");
        pod
    }

    /// The first path whose values differ, and both.
    fn difference(path: &str, ours: &Value, theirs: &Value) -> Option<String> {
        let none = Value::Null;
        match (ours, theirs) {
            (Value::Object(own), Value::Object(other)) => own.keys().chain(other.keys()).find_map(|key| {
                difference(&format!("{path}.{key}"), own.get(key).unwrap_or(&none), other.get(key).unwrap_or(&none))
            }),
            (Value::Array(own), Value::Array(other)) => (0..own.len().max(other.len())).find_map(|index| {
                let of = |values: &[Value]| values.get(index).cloned().unwrap_or_default();
                difference(&format!("{path}[{index}]"), &of(own), &of(other))
            }),
            (ours, theirs) => (ours != theirs).then(|| format!("{path}: ours {ours}, theirs {theirs}")),
        }
    }

    #[track_caller]
    fn is_the_same(what: &str, ours: &Value, theirs: &Value) {
        let mut theirs = comparable(theirs);
        // The API server ignores it in the wrong place.
        for volume in theirs["spec"]["volumes"].as_array_mut().unwrap() {
            volume.as_object_mut().unwrap().remove("type");
        }
        assert_eq!(difference("pod", &comparable(ours), &theirs), None, "{what}");
    }

    #[test]
    fn the_pods_of_recorded_messages_are_those_of_the_existing_worker() {
        let mut count = 0;
        for one in lines(include_str!("../../../fixtures/screwdriver/pods.jsonl")) {
            let Ok(Message::Start(build)) = Message::from_json(one["message"].clone()) else { panic!("{one}") };
            is_the_same(&build.id().to_string(), &made(&build, &source(json!({}))), &one["pod"]);
            count += 1;
        }
        assert_eq!(count, 23);
    }

    #[test]
    fn annotations_and_keys_make_the_pods_that_screwdrivers_executor_makes() {
        for one in lines(include_str!("../../../fixtures/screwdriver/executor-pods.jsonl")) {
            let mut keys = one["source"].clone();
            keys["ui"] = "http://127.0.0.1:28082".into();
            keys["store"] = "http://127.0.0.1:28083".into();
            is_the_same(&one["name"].to_string(), &made(&build(one["build"].clone()), &source(keys)), &one["pod"]);
        }
    }

    #[test]
    fn no_value_of_a_message_changes_the_structure_of_a_pod() {
        let source = source(json!({ "cache_path": "/cache" }));
        let plain = made(&build(fields()), &source);
        for odd in [
            "\"",
            "'",
            "a\"\n  hostNetwork: true\n#",
            "a\nspec: {}",
            "{{ secret }}",
            "{% raw %}",
            "}, {",
            "- x",
            "&a *b",
            "!!str",
            "\\",
            "\u{85}\u{2028}",
            "\t",
            "null",
            "~",
            "1e3",
            "0x1",
            "<&>",
            "🦀",
            "$(rm -rf /)",
            "`id`",
            "",
        ] {
            let mut fields = fields();
            fields["container"] = odd.into();
            fields["jobName"] = odd.into();
            fields["pipeline"]["name"] = odd.into();
            let mut pod = made(&build(fields), &source);
            let container = &mut pod["spec"]["containers"][0];
            assert_eq!((container["image"].as_str(), container["env"][4]["value"].as_str()), (Some(odd), Some(odd)));
            container["image"] = "scn/a:1".into();
            container["env"][4]["value"] = "scn/a:1".into();
            for label in ["screwdriver.cd/job", "screwdriver.cd/pipeline"] {
                pod["metadata"]["labels"].as_object_mut().unwrap().remove(label);
            }
            assert_eq!(difference("pod", &pod, &plain), None, "{odd:?}");
        }
    }

    #[test]
    fn s18_a_pod_holds_no_token_and_its_launcher_reads_it_from_a_secret() {
        let mut fields = fields();
        fields["token"] = "eyJhbGciOiJIUzI1NiJ9.e30.c2ln".into();
        fields["apiUri"] = "http://api.example/$(id)/`id`/\"x".into();
        let without_api = ScrewdriverSource { api: None, ..source(json!({})) };
        let pod = made(&build(fields), &without_api);
        assert!(!pod.to_string().contains("eyJ"), "{pod}");
        let container = &pod["spec"]["containers"][0];
        let args = container["args"][0].as_str().unwrap();
        let start = "/opt/sd/run.sh \"$SD_TEMPORAL_TOKEN\" \"http://api.example/%24(id)/%60id%60/%22x\" ";
        assert!(args.starts_with(start), "{args}");
        let variables = container["env"].as_array().unwrap();
        let token = variables.iter().find(|one| one["name"] == "SD_TEMPORAL_TOKEN").unwrap();
        let reference = &token["valueFrom"]["secretKeyRef"];
        assert_eq!((&reference["name"], &reference["key"]), (&pod["metadata"]["name"], &json!("token")));
    }

    #[test]
    fn s1_the_name_of_a_pod_is_the_same_for_each_attempt_and_another_for_each_launch() {
        assert_eq!(pod_name("beta-", 1001, 0), pod_name("beta-", 1001, 0));
        let names: std::collections::BTreeSet<String> =
            (0..50).flat_map(|id| (0..3).map(move |launch| pod_name("", id, launch))).collect();
        assert_eq!(names.len(), 150);
    }

    #[test]
    fn the_value_of_a_label_is_one_that_kubernetes_accepts() {
        for (text, expected) in [
            ("org/repo", "org.repo"),
            ("PR-12:main", "PR-12.main"),
            ("--_a & b!", "a.b"),
            ("ü", ""),
            (&format!("{}-{}", "x".repeat(62), "y".repeat(9)), &"x".repeat(62)),
        ] {
            assert_eq!(label(text), *expected, "{text}");
        }
        for (name, is_one) in
            [("PR-7", true), ("pr-7:a-b", true), ("PR-", false), ("PR-7a", false), ("PRü7", false), ("main", false)]
        {
            assert_eq!(is_of_pull_request(name), is_one, "{name}");
        }
    }

    #[test]
    fn an_operators_template_sees_the_message_and_is_told_what_is_wrong_with_it() {
        let of = |template: &str| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), template).unwrap();
            let made = BuildTemplate::load(Some(file.path()))
                .and_then(|template| template.pod(&build(fields()), &source(json!({})), 0));
            made.map_err(|error| {
                let text = error.to_string();
                assert!(text.contains(&file.path().display().to_string()) && !text.contains("scn/a"), "{text}");
                text
            })
        };
        let pod = of("spec: { containers: [{ name: {{ container }}, image: {{ message.container }} }] }").unwrap();
        assert_eq!(pod["metadata"], json!({ "name": pod_name("", 7, 0), "labels": { BUILD_LABEL: "7" } }));
        assert_eq!(pod["spec"]["containers"][0]["image"], "scn/a:1");
        for (template, words) in [
            ("spec: {{ message.token }}", "undefined"),
            ("spec: {{ typo }}", "undefined"),
            ("{% if %}", "syntax error"),
            ("spec: { containers: [{ name: other }] }", "no container has the name {{ container }}"),
            ("spec: { containers: {{ image }} }", "it makes no pod"),
            ("spec: [", "it makes no pod"),
        ] {
            let error = of(template).unwrap_err();
            assert!(error.contains(words), "{template}: {error}");
        }
        assert!(BuildTemplate::load(Some(Path::new("/none"))).is_err());
    }
}
