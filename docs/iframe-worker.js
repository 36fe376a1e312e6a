// Browsers start no Worker for a page that was opened from the disk: there, what searches runs in a hidden frame.
// Its name keeps MkDocs' plugin "offline" from fetching one of the net.
class FrameWorker extends EventTarget {
  constructor(url) {
    super()
    const frame = document.createElement("iframe")
    frame.hidden = true
    frame.srcdoc = "<!doctype html><body></body>"
    this.started = new Promise((resolve) => {
      frame.addEventListener("load", () => {
        const inside = frame.contentWindow
        const script = inside.document.createElement("script")
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
        script.src = url
        script.addEventListener("load", () => resolve(inside))
        inside.document.body.append(script)
      })
    })
    document.body.append(frame)
  }

  postMessage(data) {
    this.started.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
  }
}
if (location.protocol === "file:") window.Worker = FrameWorker
